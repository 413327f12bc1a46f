"""Many iterations at once, for a simulator: those in which an instance decides nothing."""

from collections.abc import Sequence

from actorserve.core.effects import Effect
from actorserve.core.instance.parts import InstanceParts
from actorserve.core.instance.steps import Steps
from actorserve.core.instance.token_output import send_tokens
from actorserve.core.participant import Participant


class QuietSteps:
    """Predicts how many iterations will be quiet, and applies those that have ended, with the same result as one by
    one.
    """

    def __init__(self, parts: InstanceParts, steps: Steps, participants: Sequence[Participant]) -> None:
        self._config = parts.config
        self._requests = parts.requests
        self._memory = parts.memory
        self._policy = parts.policy
        self._times = parts.times
        self._batcher = parts.batcher
        self._effects = parts.effects
        self._steps = steps
        self._participants = participants

    def count(self) -> int:
        """How many iterations, from the one in flight on, will each do nothing but give a token to each of its rows.

        That requires that all requests are in it and decode, that none of these iterations gives a request its last
        token, and that there are blocks for all of them. Then nothing is decided in between unless a message comes.
        """
        step, memory = self._steps.in_flight, self._memory
        if step is None or memory.is_copying or self._config.prefix_cache:
            return 0
        if any(participant.wants_step_end for participant in self._participants):
            return 0
        if not len(self._requests) == len(step.batch.rows) == step.batch.num_decodes:
            return 0
        max_tokens = num_steps = self._config.max_tokens
        for request, _ in step.batch.rows:
            sampling = request.sampling
            if request.num_uncomputed != 1 or sampling.stop_token_ids or request.copy_id is not None:
                return 0
            num_left = min(sampling.max_tokens - request.num_output, max_tokens - len(request.token_ids))
            num_steps = min(num_steps, num_left - 1)
        # One block for each request is left free: with less, urgency decides who gets one (``scheduling.batching``).
        num_free = memory.device.num_free_blocks - len(self._requests)
        while num_steps > 0 and self._num_grown_blocks(num_steps) > num_free:
            num_steps //= 2
        return max(0, num_steps)

    def advance(self, ends: Sequence[tuple[float, float]], token_id: int) -> list[Effect]:
        """Quiet iterations have ended, each at (now, duration_s), with ``token_id`` for each of their rows.

        Equal to handling their StepDones one by one, with two differences: the tokens go to each gateway in one
        message, request by request, and only the last RunStep is an effect.
        """
        step, on_service = self._steps.in_flight, self._policy.on_service
        assert step is not None
        batch = step.batch
        firsts = {request: request.num_output for request, _ in batch.rows}
        for now, duration_s in ends:
            budget = batch.budget
            assert budget is not None
            iteration = budget.iteration
            self._times.observe(iteration, duration_s)
            decode_s = self._times.decode_s(iteration.num_decodes, iteration.num_context_tokens)
            for request, _ in batch.rows:
                request.num_computed += 1
                request.append(token_id, None)
                on_service(request, decode_s, now)
                if request.owed_s > 0.0:
                    self._batcher.on_token(request, decode_s)
            batch = self._batcher.plan_quiet(now)
        send_tokens(
            ((request, position) for request, first in firsts.items() for position in range(first, request.num_output)),
            self._effects,
        )
        self._steps.begin(batch, num_skipped=len(ends) - 1)
        return self._effects.take()

    def _num_grown_blocks(self, num_steps: int) -> int:
        """Blocks that all requests together grow by in ``num_steps`` iterations."""
        blocks_for = self._memory.blocks_for
        return sum(
            blocks_for(len(request.token_ids) + num_steps) - len(request.blocks) for request in self._requests.values()
        )

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
        self._batcher = parts.batcher
        self._effects = parts.effects
        self._steps = steps
        self._participants = participants

    def count(self) -> int:
        """How many iterations, from the newest in flight on, will each do nothing but give a token to each of its rows.

        That requires that all requests are in it and decode, that none of these iterations gives a request its last
        token, and that there are blocks for all of them. Then nothing is decided in between unless a message comes.
        """
        memory = self._memory
        if not self._steps.in_flight or memory.is_copying or memory.waits_for_steps or self._config.prefix_cache:
            return 0
        if any(participant.wants_step_end for participant in self._participants):
            return 0
        batch = self._steps.in_flight[-1].batch
        if not len(self._requests) == len(batch.rows) == batch.num_decodes:
            return 0
        max_tokens = num_steps = self._config.max_tokens
        for request, _ in batch.rows:
            sampling = request.sampling
            if request.num_uncomputed != 1 or sampling.stop_token_ids or request.copy_id is not None:
                return 0
            num_output = request.num_tokens - request.num_prompt
            num_steps = min(num_steps, sampling.max_tokens - num_output, max_tokens - request.num_tokens)
        # One block for each request is left free: with less, urgency decides who gets one (``scheduling.batching``).
        num_free = memory.device.num_free_blocks - len(self._requests)
        while num_steps > 0 and self._num_grown_blocks(num_steps) > num_free:
            num_steps //= 2
        return max(0, num_steps)

    def advance(self, ends: Sequence[tuple[float, float]], token_id: int) -> list[Effect]:
        """Quiet iterations have ended, each at (now, duration_s), with ``token_id`` for each of their rows. The first
        of them is the only one in flight.

        Equal to handling their StepDones, and the Ticks at which the next ones are planned, one by one, with two
        differences: the tokens go to each gateway in one message, request by request, and only the last RunStep is an
        effect.
        """
        steps = self._steps
        firsts = {request: request.num_output for request, _ in steps.in_flight[0].batch.rows}
        num_left = len(ends)
        for now, duration_s in ends:
            num_left -= 1
            if steps.next_plan_s is not None and steps.next_plan_s < now:
                self._plan(steps.next_plan_s, is_last=not num_left)
            steps.finish_quiet(now, duration_s, token_id)
            if not steps.in_flight:
                self._plan(now, is_last=not num_left)
        run_step = self._effects.pop()
        send_tokens(
            ((request, position) for request, first in firsts.items() for position in range(first, request.num_output)),
            self._effects,
        )
        self._effects.append(run_step)
        return self._effects.take()

    def _plan(self, now: float, *, is_last: bool) -> None:
        """Plan the next iteration. Only the last one is an effect, because the others have ended."""
        self._steps.look_ahead(now)
        batch = self._batcher.plan_quiet(now)
        if is_last:
            self._steps.begin(batch, now)
        else:
            self._steps.follow(batch, now)

    def _num_grown_blocks(self, num_steps: int) -> int:
        """Blocks that all requests together grow by in ``num_steps`` iterations, and for one that is planned then."""
        blocks_for = self._memory.blocks_for
        return sum(
            blocks_for(request.num_tokens + num_steps) - len(request.blocks) for request in self._requests.values()
        )

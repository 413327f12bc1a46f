"""Many iterations at once, for a simulator: those in which an instance decides nothing."""

from collections.abc import Sequence

from actorserve.core.effects import Effect
from actorserve.core.instance.parts import InstanceParts
from actorserve.core.instance.steps import Steps
from actorserve.core.instance.token_output import send_tokens
from actorserve.core.participant import Participant
from actorserve.core.request import Request
from actorserve.core.timing.step_times import Iteration


class QuietSteps:
    """Predicts how many iterations will be quiet, and applies those that have ended, with the same result as one by
    one. The work grows with the rows of an iteration, and hardly with the number of iterations.
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
        """How many iterations, from the newest in flight on, will each do nothing but give a token to each of its rows.

        That requires that all requests are in it and decode, that none of these iterations gives a request its last
        token, and that there are blocks for all of them. Then nothing is decided in between unless a message comes.
        """
        memory = self._memory
        if not self._steps.in_flight or memory.is_copying or memory.waits_for_steps or self._config.prefix_cache:
            return 0
        if memory.rows.num_windowed:
            return 0  # because requests give up blocks in between
        batch = self._steps.in_flight[-1].batch
        if not len(self._requests) == len(batch.rows) == batch.num_decodes:
            return 0
        if any(participant.wants_step_end for participant in self._participants):
            return 0
        max_tokens = num_steps = self._config.max_tokens
        for request, _ in batch.rows:
            sampling = request.sampling
            num_tokens = request.num_tokens
            if num_tokens - request.num_fed != 1 or sampling.stop_token_ids or request.copy_id is not None:
                return 0
            num_left = min(sampling.max_tokens - num_tokens + request.num_prompt, max_tokens - num_tokens)
            if num_left < num_steps:
                num_steps = num_left
        # One block for each request is left free: with less, urgency decides who gets one (``scheduling.batching``).
        num_free = memory.device.num_free_blocks - len(self._requests)
        while num_steps > 0 and self._num_grown_blocks(num_steps) > num_free:
            num_steps //= 2
        return max(0, num_steps)

    def advance(self, ends: Sequence[tuple[float, float]], token_id: int) -> list[Effect]:
        """Quiet iterations have ended, each at (now, duration_s), with ``token_id`` for each of their rows. The first
        of them is the only one in flight.

        Equal to handling their StepDones, and the Ticks at which the next ones are planned, one by one, with two
        differences: the tokens go to each gateway in one message, a run of tokens for each request, and only the last
        RunStep is an effect.
        """
        steps, policy = self._steps, self._policy
        step = steps.in_flight[0]
        assert step.batch.budget is not None
        order: Sequence[Request] = [request for request, _ in step.batch.rows]
        iteration = step.batch.budget.iteration
        is_charged, plan_s = step.is_charged, steps.next_plan_s
        quiet = _QuietRows(order, token_id)
        growing = self._growing(order, len(ends))
        planned_s = now = 0.0
        for now, duration_s in ends:
            is_planned = plan_s is not None and plan_s < now
            planned_s = plan_s if plan_s is not None and is_planned else now
            if not is_planned:
                self._times.observe(iteration, duration_s)
            if not is_charged:
                self._charge(order, iteration, planned_s, quiet)
            next_order = policy.order(planned_s)
            quiet.num_ended += 1
            self._grow(growing, quiet.num_ended, next_order)
            if is_planned:
                self._times.observe(iteration, duration_s)
            order, is_charged = next_order, False
            iteration = Iteration(self._times.profile, len(order), iteration.num_context_tokens + len(order))
            plan_s = steps.time_to_plan_s(iteration, now) if self._config.run_ahead else None
        quiet.finish()
        send_tokens([(request, request.num_output - len(ends), len(ends)) for request in quiet.requests], self._effects)
        steps.follow_quiet(self._batcher.quiet_batch(order, planned_s), len(ends), now)
        return self._effects.take()

    def _charge(self, order: Sequence[Request], iteration: Iteration, now: float, quiet: "_QuietRows") -> None:
        """Count the service of an iteration, as ``Steps`` does."""
        service_s = self._times.decode_s(iteration.num_decodes, iteration.num_context_tokens)
        for moving in self._policy.on_service(order, service_s, now):
            quiet.update(moving)
            self._policy.move(moving)
        for request in quiet.owing:
            self._batcher.on_token(request, service_s)

    def _growing(self, requests: Sequence[Request], num_steps: int) -> dict[int, list[Request]]:
        """The requests that need a block, by how many iterations have ended when they first need it."""
        tokens_per_block = self._memory.tokens_per_block
        growing: dict[int, list[Request]] = {}
        for request in requests:
            num_fitting = len(request.blocks) * tokens_per_block - len(request.token_ids)
            if num_fitting < num_steps:
                growing.setdefault(num_fitting + 1, []).append(request)
        return growing

    def _grow(self, growing: dict[int, list[Request]], num_ended: int, order: Sequence[Request]) -> None:
        """Give a block to each request that needs one now, in their order."""
        requests = growing.pop(num_ended, None)
        if requests is None:
            return
        if len(requests) > 1:
            requests.sort(key=order.index)
        for request in requests:
            if not self._memory.add_block(request):
                raise ValueError("a quiet step has no block")
        growing.setdefault(num_ended + self._memory.tokens_per_block, []).extend(requests)

    def _num_grown_blocks(self, num_steps: int) -> int:
        """Blocks that all requests together grow by in ``num_steps`` iterations, and for one that is planned then."""
        blocks_for = self._memory.blocks_for
        return sum(
            [blocks_for(request.num_tokens + num_steps) - len(request.blocks) for request in self._requests.values()]
        )


class _QuietRows:
    """Requests that get a token from each of several iterations, and learn of them when tokens are needed."""

    def __init__(self, requests: Sequence[Request], token_id: int) -> None:
        self.requests = requests
        self.owing = [request for request in requests if request.owed_s > 0.0]
        self.num_ended = 0
        self._token_id = token_id
        self._num_told: dict[Request, int] = {}

    def update(self, request: Request) -> None:
        """Tell a request of the iterations that have ended."""
        num_steps = self.num_ended - self._num_told.get(request, 0)
        if num_steps:
            request.append_run(self._token_id, num_steps)
            request.num_computed += num_steps
            self._num_told[request] = self.num_ended

    def finish(self) -> None:
        """Tell all requests, and that none of them is in an iteration in flight."""
        for request in self.requests:
            self.update(request)
            request.num_coming -= 1
            request.num_ahead -= 1

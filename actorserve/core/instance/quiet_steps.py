"""Many iterations at once, for a simulator: those in which an instance decides nothing."""

from collections.abc import Callable, Sequence

from actorserve.core.effects import Effect, Effects
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.instance.parts import InstanceParts
from actorserve.core.instance.steps import Step, Steps
from actorserve.core.instance.token_output import send_tokens
from actorserve.core.participant import Participant
from actorserve.core.request import Request
from actorserve.core.timing.step_times import Iteration, StepTimes

Ending = tuple[int, int, str]
"""How many iterations follow before the one in which a request gets its last token, how many tokens it has then, and
its id."""


class QuietSteps:
    """Predicts how many iterations will be quiet, and applies those that have ended, with the same result as one by
    one. The work grows with the rows of an iteration, and hardly with the number of iterations.

    A run of quiet iterations may be advanced in parts. Its requests learn of their tokens when the run is settled,
    which the instance does before it handles a message. Until then memory, policy and the list of requests are up to
    date, and requests and ``Steps`` are not.
    """

    def __init__(
        self,
        parts: InstanceParts,
        steps: Steps,
        participants: Sequence[Participant],
        end: Callable[[Sequence[Request], float], None],
    ) -> None:
        """``end`` is called with the requests that an iteration ends, and the time."""
        self._config = parts.config
        self._requests = parts.requests
        self._memory = parts.memory
        self._policy = parts.policy
        self._times = parts.times
        self._batcher = parts.batcher
        self._effects = parts.effects
        self._steps = steps
        self._participants = participants
        self._end = end
        self._run: _Run | None = None

    def count(self) -> int:
        """How many iterations, from the newest in flight on, will each only give a token to each of its rows, and end
        the requests that have all of their tokens then. At least one request is left afterwards.

        That requires that all requests are in it and decode, and that there are blocks for all of them. Then nothing is
        decided in between unless a message comes.
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
        num_steps, max_tokens = 0, self._config.max_tokens
        for request, _ in batch.rows:
            if request.num_uncomputed != 1 or request.sampling.stop_token_ids or request.copy_id is not None:
                return 0
            if request.num_tokens <= request.num_prompt + 1:
                return 0  # its client waits for the first token
            num_left = request.num_left(max_tokens)
            if num_left > num_steps:
                num_steps = num_left
        # One block for each request is left free: with less, urgency decides who gets one (``scheduling.batching``).
        num_free = memory.device.num_free_blocks - len(self._requests)
        while num_steps > 0 and not self._can_grow(num_steps, num_free):
            num_steps //= 2
        return num_steps

    def endings(self) -> list[Ending]:
        """When the requests in the newest iteration in flight end, in order of time."""
        max_tokens = self._config.max_tokens
        endings: list[Ending] = []
        for request, _ in self._steps.in_flight[-1].batch.rows:
            num_left = request.num_left(max_tokens)
            endings.append((num_left, request.num_tokens + num_left, request.request_id))
        return sorted(endings)

    @property
    def next_plan_s(self) -> float | None:
        """When the iteration after the one in flight is due to be planned ahead; None if that waits for an event."""
        return self._steps.next_plan_s if self._run is None else self._run.plan_s

    def will_grow(self, until_s: float) -> bool:
        """Whether a request gets a block before this time, because the next iteration is planned ahead before it."""
        if len(self._steps.in_flight) > 1:
            return False  # that one is planned already
        run = self._opened()
        return run.plan_s is not None and run.plan_s < until_s and run.num_ended + 1 in run.growing

    def advance(self, ends: Sequence[tuple[float, float]], token_id: int) -> list[Effect]:
        """Quiet iterations have ended, each at (now, duration_s), with ``token_id`` for each of their rows. The first
        of them is the only one in flight. Only the last of them may end requests.

        Equal to handling their StepDones, and the Ticks at which the next ones are planned, one by one, with two
        differences: a request's tokens come when it ends or the run is settled, as one run, and no RunStep is an
        effect.
        """
        run = self._opened()
        run.token_id = token_id
        policy, times, runs_ahead = self._policy, self._times, self._config.run_ahead
        iteration, plan_s = run.iteration, run.plan_s
        for now, duration_s in ends:
            before = run.order
            self._steps.num_output_tokens += len(before)
            ending = run.ending.pop(run.num_ended + 1, None)
            if plan_s is not None and plan_s < now:
                run.planned_s = plan_s
                self._charge(run, plan_s)
                run.num_ended += 1
                order = policy.order(plan_s)
                run.order = order if ending is None else [request for request in order if request not in ending]
                self._grow(run)
                times.observe(iteration, duration_s)
                num_gone = 0 if ending is None else self._finish(run, before, ending, now)
            else:
                run.planned_s = now
                times.observe(iteration, duration_s)
                self._charge(run, now)
                run.num_ended += 1
                num_gone = 0 if ending is None else self._finish(run, before, ending, now)
                run.order = policy.order(now)
                self._grow(run)
            iteration.set_decodes(len(run.order), iteration.num_context_tokens + len(before) - num_gone)
            plan_s = self._steps.time_to_plan_s(iteration, now) if runs_ahead else None
            run.now = now
        run.plan_s = plan_s
        return self._effects.take()

    def stop(self) -> list[Effect]:
        """Settle the run, and return what that leads to."""
        self.settle()
        return self._effects.take()

    def settle(self) -> None:
        """Tell all requests, and ``Steps``, of the iterations that have ended."""
        run, self._run = self._run, None
        if run is None or not run.num_ended:
            return
        for request in run.order:
            run.tell_end(request)
        run.send(run.order, self._effects)
        batch = self._batcher.quiet_batch(run.order, run.iteration.num_context_tokens, run.planned_s)
        self._steps.follow_quiet(batch, run.num_ended, run.now)

    def _opened(self) -> "_Run":
        """The run, which begins with the iteration in flight."""
        if self._run is None:
            (step,) = self._steps.in_flight
            self._run = _Run(step, self._steps.next_plan_s, self._times, self._memory.tokens_per_block, self._config)
        return self._run

    def _charge(self, run: "_Run", now: float) -> None:
        """Count the service of an iteration, as ``Steps`` does."""
        if run.is_charged:
            run.is_charged = False
            return
        iteration = run.iteration
        service_s = self._times.decode_s(iteration.num_decodes, iteration.num_context_tokens)
        for moving in self._policy.on_service(run.order, service_s, now):
            run.tell(moving)
            self._policy.move(moving)
        for request in run.owing:
            if request.owed_s > 0.0:
                self._batcher.on_token(request, service_s)

    def _grow(self, run: "_Run") -> None:
        """Give a block to each request that needs one now, in their order."""
        growing = run.growing.pop(run.num_ended, None)
        if growing is None:
            return
        requests = [request for request in run.order if request in growing]
        for request in requests:
            if not self._memory.add_block(request):
                raise ValueError("a quiet step has no block")
        if requests:
            run.growing.setdefault(run.num_ended + self._memory.tokens_per_block, []).extend(requests)

    def _finish(self, run: "_Run", order: Sequence[Request], ending: Sequence[Request], now: float) -> int:
        """End requests of an iteration, which had this order. Returns how many tokens they have together."""
        self._memory.on_step_ended(run.first_step + run.num_ended - 1)
        requests = [request for request in order if request in ending]
        run.owing = [request for request in run.owing if request not in ending]
        num_tokens = 0
        for request in requests:
            run.tell_end(request)
            num_tokens += len(request.token_ids)
            if request.check_finished(self._config.max_tokens) is None:
                raise ValueError("a quiet step ends a request that lacks tokens")
        run.send(requests, self._effects)
        self._end(requests, now)
        return num_tokens

    def _can_grow(self, num_steps: int, num_free: int) -> bool:
        """Whether so many free blocks suffice for ``num_steps`` iterations, and for one that is planned then."""
        memory = self._memory
        if len(self._requests) * (memory.rows_for(num_steps) + 1) <= num_free:
            return True
        num_grown = 0
        for request in self._requests.values():
            num_more = min(num_steps, request.num_left(self._config.max_tokens))
            num_grown += memory.blocks_for(request.num_tokens + num_more) - len(request.blocks)
        return num_grown <= num_free


class _Run:
    """Iterations with the same requests, but for those that end.

    ``order`` is that of the iteration in flight, which is planned next at ``plan_s`` unless it ends before. ``ending``
    and ``growing`` have the requests that get their last token, and those that need a block for the next iteration, by
    how many iterations have ended then.
    """

    def __init__(
        self, step: Step, plan_s: float | None, times: StepTimes, tokens_per_block: int, config: InstanceConfig
    ) -> None:
        assert step.batch.budget is not None
        self.order: Sequence[Request] = [request for request, _ in step.batch.rows]
        self.owing = [request for request in self.order if request.owed_s > 0.0]
        num_context_tokens = step.batch.budget.iteration.num_context_tokens
        self.iteration = Iteration(times.profile, len(self.order), num_context_tokens)
        self.first_step = step.step_id
        self.is_charged = step.is_charged
        self.plan_s = plan_s
        self.planned_s = self.now = 0.0
        self.num_ended = 0
        self.token_id = 0
        self.ending: dict[int, list[Request]] = {}
        self.growing: dict[int, list[Request]] = {}
        self._num_told: dict[Request, int] = {}
        max_tokens = config.max_tokens
        for request in self.order:
            self.ending.setdefault(request.num_left(max_tokens) + 1, []).append(request)
            num_fitting = len(request.blocks) * tokens_per_block - len(request.token_ids)
            self.growing.setdefault(num_fitting + 1, []).append(request)

    def tell(self, request: Request) -> None:
        """Tell a request of the iterations that have ended."""
        num_steps = self.num_ended - self._num_told.get(request, 0)
        if num_steps:
            request.append_run(self.token_id, num_steps)
            request.num_computed += num_steps
            self._num_told[request] = self.num_ended

    def tell_end(self, request: Request) -> None:
        """The same, and that no iteration in flight names it."""
        self.tell(request)
        request.num_coming -= 1
        request.num_ahead -= 1

    def send(self, requests: Sequence[Request], effects: Effects) -> None:
        """Send what these requests got in the run."""
        num_tokens = self.num_ended
        send_tokens([(request, request.num_output - num_tokens, num_tokens) for request in requests], effects)

"""The iterations in flight: when they begin, and what their ends mean for each of their requests.

The engine runs iterations one after the other, and a second one is begun before the first has ended, so that the engine
does not wait while the scheduler looks at tokens. It is planned as if the first had ended: its rows feed tokens that
are not known yet (``NOT_YET``), and the engine fills them in. A request may end by a token that was not known when the
second iteration was planned; the token that it makes there is dropped.

A request that arrives after an iteration was planned waits for the next one. So an iteration is planned as late as
possible: shortly before the one in flight is expected to end.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf

from actorserve.core.effects import RunStep
from actorserve.core.instance.energy_rows import energy_rows
from actorserve.core.instance.parts import InstanceParts
from actorserve.core.instance.token_output import Run, send_tokens
from actorserve.core.messages import Energy, FinishReason, PowerReading, StepDone, StepPlan
from actorserve.core.power.accounting import EnergyAccount
from actorserve.core.request import Request
from actorserve.core.scheduling.batch import Batch
from actorserve.core.timing.step_times import Iteration, StepTimes

_MAX_IN_FLIGHT = 2
_PLANNING_S = 0.003  # to plan an iteration and bring it to the engine, with the event loop's delay of 1 ms
_EARLIER = 0.05  # of the expected duration, because an iteration may end earlier than expected

MakePlan = Callable[[Batch, int], StepPlan]
"""Makes the plan that the engine gets, from an iteration and its number."""


def plan_after_s(expected_s: float) -> float:
    """How long after the beginning of an iteration, which is expected to take ``expected_s``, the next is planned."""
    return max(0.0, (1.0 - _EARLIER) * expected_s - _PLANNING_S)


@dataclass(slots=True, eq=False)
class Step:
    """An iteration that the engine runs.

    Of each row: ``starts``, the tokens that were fed before; ``samples``, whether it makes a token; and ``blocks``, the
    request's list of blocks. A request that has another list at the end has lost what the iteration computed.
    ``is_charged``: its requests' service has been counted.
    """

    step_id: int
    batch: Batch
    starts: Sequence[int]
    samples: Sequence[bool]
    blocks: Sequence[list[int]]
    is_charged: bool = False


class Steps:
    """Begins iterations, and takes their results in order."""

    def __init__(self, parts: InstanceParts, make_plan: MakePlan) -> None:
        self.in_flight: deque[Step] = deque()
        self.next_plan_s: float | None = None
        """When the next iteration is due to be planned while one is in flight; None if an event is waited for."""
        self.energy = EnergyAccount()
        self._requests = parts.requests
        self._memory = parts.memory
        self._policy = parts.policy
        self._times = parts.times
        self._batcher = parts.batcher
        self._max_tokens = parts.config.max_tokens
        self._runs_ahead = parts.config.run_ahead
        self._effects = parts.effects
        self._make_plan = make_plan
        self._num_steps = 0
        self._newest: Batch | None = None
        self.num_output_tokens = 0
        self._began_s = 0.0  # when the oldest iteration in flight began
        self._plan_from_s = inf  # while one iteration is in flight, the next one is planned from this time on

    @property
    def running(self) -> Collection[Request]:
        """The requests in the iterations in flight, each once."""
        return {request: None for step in self.in_flight for request, _ in step.batch.rows}.keys()

    @property
    def num_in_batch(self) -> int:
        """How many requests that are still here the newest iteration has, whether it has ended or not."""
        return 0 if self._newest is None else sum([self._is_here(request) for request, _ in self._newest.rows])

    def is_running(self, request: Request) -> bool:
        """Whether an iteration in flight names the request."""
        return self._memory.is_running(request)

    def left_s(self, request: Request, now: float) -> float:
        """How long the iterations in flight that name the request are expected to go on; 0 if there are none."""
        expected_s = 0.0
        for step in self.in_flight:
            if step.step_id <= request.last_step:
                assert step.batch.budget is not None
                expected_s += self._times.step_s(step.batch.budget.iteration)
        return max(0.0, expected_s - (now - self._began_s)) if expected_s else 0.0

    def energy_of(self, request: Request) -> Energy | None:
        """What was spent on the request here; None if that is not known."""
        return self.energy.spent(request)

    def read_power(self, reading: PowerReading, now: float) -> None:
        """The power of what computes the iterations was read."""
        self.energy.read(reading, now, (request for request in self._requests.values() if request.last_step))

    # --- planning ----------------------------------------------------------------------------------------------------

    def is_due(self, now: float) -> bool:
        """Whether the next iteration is to be planned now."""
        return not self.in_flight or (len(self.in_flight) < _MAX_IN_FLIGHT and now >= self._plan_from_s)

    def look_ahead(self, now: float) -> set[Request]:
        """Count the service of the iteration in flight, as if it had ended. Returns the requests that end by it."""
        self.wait()
        if not self.in_flight:
            return set()
        step = self.in_flight[-1]
        self._charge(step, now)
        max_tokens = self._max_tokens
        return {request for request, _ in step.batch.rows if request.will_be_full(max_tokens)}

    def wait(self) -> None:
        """Nothing can be planned until a message comes."""
        self.next_plan_s = None

    def begin(self, batch: Batch, now: float) -> None:
        """Start an iteration."""
        self._effects.append(RunStep(self._make_plan(batch, self._num_steps + 1)))
        self.follow(batch, now)

    def follow(self, batch: Batch, now: float) -> None:
        """An iteration has begun."""
        self._num_steps += 1
        step = Step(
            self._num_steps,
            batch,
            [request.num_fed for request, _ in batch.rows],
            [num_fed == request.num_uncomputed for request, num_fed in batch.rows],
            [request.blocks for request, _ in batch.rows],
        )
        self.in_flight.append(step)
        if len(self.in_flight) == 1:
            self.energy.begin(now)
        self._newest = batch
        step_id = self._num_steps
        for (request, num_fed), samples in zip(batch.rows, step.samples, strict=True):
            if not request.last_step:
                request.waited_s = now - request.came_s
            request.last_step = step_id
            request.num_ahead += num_fed
            if samples:
                request.num_coming += 1
        self._expect_end(now)

    def _expect_end(self, now: float) -> None:
        """The oldest iteration in flight begins now."""
        self.next_plan_s = None
        if len(self.in_flight) != 1:
            return
        self._began_s = now
        if not self._runs_ahead:
            return
        budget = self.in_flight[0].batch.budget
        assert budget is not None
        self._plan_from_s = self.next_plan_s = self.time_to_plan_s(budget.iteration, now)

    def time_to_plan_s(self, iteration: Iteration, now: float) -> float:
        """When to plan what follows ``iteration``, which begins now."""
        return now + plan_after_s(self._times.step_s(iteration))

    def times_after(self, duration_s: float) -> StepTimes:
        """For a simulator: a copy of the times as they will be when the newest iteration runs alone. ``duration_s``:
        the duration of the iteration before it, if that is in flight, too.
        """
        times = self._times.copy()
        if len(self.in_flight) == _MAX_IN_FLIGHT:
            budget = self.in_flight[0].batch.budget
            assert budget is not None
            times.observe(budget.iteration, duration_s)
        return times

    # --- results -----------------------------------------------------------------------------------------------------

    def finish(self, done: StepDone, now: float) -> list[Request]:
        """The oldest iteration has ended. Sends its tokens, and returns the requests that get no further token.

        Raises: ValueError for another iteration's StepDone: a bug of the shell.
        """
        if not self.in_flight or self.in_flight[0].step_id != done.step_id:
            raise ValueError(f"step {done.step_id} is done, but was not the oldest in flight")
        step = self._end(now, done.duration_s)
        _take_prompt_scores(step, done)
        sampled = {request_id: row for row, request_id in enumerate(done.request_ids)}
        made: list[Run] = []
        finished: list[Request] = []
        for (request, num_fed), blocks, samples in zip(step.batch.rows, step.blocks, step.samples, strict=True):
            if not self._is_here(request):
                continue  # gone meanwhile, or replaced by a newer epoch
            request.num_coming -= samples
            if request.blocks is blocks:
                request.num_ahead -= num_fed
                request.num_computed += num_fed
                self._memory.share_computed(request, num_fed)
            row = sampled.get(request.request_id)
            if row is not None:
                request.append(done.token_ids[row], done.logprobs[row] if done.logprobs else None)
                made.append((request, request.num_output - 1, 1))
                if request.check_finished(self._max_tokens):
                    finished.append(request)
            elif request.request_id in done.failed:
                request.finish_reason = FinishReason.ERROR
                finished.append(request)
        self.num_output_tokens += len(made)
        send_tokens(made, self._effects)
        return finished

    def follow_quiet(self, batch: Batch, num_ended: int, now: float) -> None:
        """``num_ended`` quiet iterations have ended, the last one just now (``core.instance.quiet_steps``). ``batch``
        is in flight since then, and nothing else.
        """
        self.in_flight.clear()
        self._num_steps += num_ended - 1
        self._memory.on_step_ended(self._num_steps)
        self.follow(batch, now)

    def _end(self, now: float, duration_s: float) -> Step:
        """Take the oldest iteration from those in flight, and count its time and service."""
        step = self.in_flight.popleft()
        assert step.batch.budget is not None
        self._memory.on_step_ended(step.step_id)
        self._times.observe(step.batch.budget.iteration, duration_s)
        self._charge(step, now)
        if self.energy.is_open:
            present = {request for request, _ in step.batch.rows if self._is_here(request)}
            self.energy.end(energy_rows(step.batch, step.starts, present, self._times), now)
        if self.in_flight:
            self.energy.begin(now)
            self._expect_end(now)
        return step

    def _charge(self, step: Step, now: float) -> None:
        """Count the service of an iteration's requests, once, when it has ended or is about to end."""
        if step.is_charged:
            return
        step.is_charged = True
        assert step.batch.budget is not None
        planned = step.batch.budget.iteration
        decode_s = self._times.decode_s(max(1, planned.num_decodes), planned.num_context_tokens)
        decodes: list[Request] = []  # since the last prefill
        for (request, num_fed), start, samples in zip(step.batch.rows, step.starts, step.samples, strict=True):
            if not self._is_here(request):
                continue
            if num_fed == 1 and samples:
                decodes.append(request)
                continue
            self._charge_decodes(decodes, decode_s, now)
            decodes = []
            # The chunks of a prefill sum to the time of the whole prefill, because its level's quantum covers that.
            # Tokens whose KV was dropped are computed again, which is no service.
            begin, end = max(start, request.num_charged), max(start + num_fed, request.num_charged)
            service_s = self._times.prefill_s(end) - self._times.prefill_s(begin)
            for moving in self._policy.on_service([request], service_s, now):
                self._policy.move(moving)
            if samples:
                self._batcher.on_token(request, service_s)
        self._charge_decodes(decodes, decode_s, now)

    def _charge_decodes(self, decodes: Sequence[Request], service_s: float, now: float) -> None:
        """These requests made a token each, and were served for ``service_s`` each."""
        for moving in self._policy.on_service(decodes, service_s, now):
            self._policy.move(moving)
        for request in decodes:
            if request.owed_s > 0.0:
                self._batcher.on_token(request, service_s)

    def _is_here(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def validate(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        assert len(self.in_flight) <= _MAX_IN_FLIGHT, "too many iterations are in flight"
        running = self.running
        num_ahead: dict[Request, int] = dict.fromkeys(self._requests.values(), 0)
        num_coming = dict(num_ahead)
        for step in self.in_flight:
            for (request, num_fed), blocks, samples in zip(step.batch.rows, step.blocks, step.samples, strict=True):
                if request in num_ahead:
                    num_ahead[request] += num_fed if request.blocks is blocks else 0
                    num_coming[request] += samples
        for request in self._requests.values():
            name = request.request_id
            assert self.is_running(request) == (request in running), f"{name} runs, or does not, against its last step"
            assert request.num_ahead == num_ahead[request], f"{name}: {request.num_ahead} tokens of KV are not coming"
            assert request.num_coming == num_coming[request], f"{name}: {request.num_coming} tokens are not coming"


def _take_prompt_scores(step: Step, done: StepDone) -> None:
    """Keep what the iteration tells of its requests' prompts."""
    if done.prompt_logprobs:
        for (request, _), start, found in zip(step.batch.rows, step.starts, done.prompt_logprobs, strict=True):
            if found is not None and request.prompt_scores is not None:
                request.prompt_scores.put(start + 1, found)

"""The iteration in flight: how it begins, and what its end means for each of its requests."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from actorserve.core.effects import RunStep
from actorserve.core.instance.parts import InstanceParts
from actorserve.core.instance.token_output import Row, send_tokens
from actorserve.core.messages import FinishReason, StepDone
from actorserve.core.request import Request
from actorserve.core.scheduling.batch import Batch


@dataclass(frozen=True, slots=True)
class Step:
    """An iteration that the engine runs."""

    step_id: int
    batch: Batch
    starts: Sequence[int]  # of each row: the tokens that were computed before

    @property
    def requests(self) -> list[Request]:
        return [request for request, _ in self.batch.rows]


class Steps:
    """Runs one iteration at a time."""

    def __init__(self, parts: InstanceParts) -> None:
        self.in_flight: Step | None = None
        self.removed: list[Request] = []  # requests that are gone while the step in flight still writes their blocks
        self._requests = parts.requests
        self._memory = parts.memory
        self._policy = parts.policy
        self._times = parts.times
        self._batcher = parts.batcher
        self._max_tokens = parts.config.max_tokens
        self._effects = parts.effects
        self._num_steps = 0

    @property
    def running(self) -> Collection[Request]:
        """The requests in the iteration in flight."""
        return () if self.in_flight is None else self.in_flight.requests

    def begin(self, batch: Batch, num_skipped: int = 0) -> None:
        """Start an iteration. ``num_skipped`` iterations before it have ended without a Step."""
        self._num_steps += 1 + num_skipped
        plan = batch.step_plan(self._num_steps)
        self.in_flight = Step(self._num_steps, batch, plan.starts)
        self._effects.append(RunStep(plan))

    def free(self, request: Request) -> None:
        """Free the blocks of a request that is gone, once the iteration in flight does not write them."""
        if request in self.running:
            self.removed.append(request)
        else:
            self._memory.drop(request)

    def finish(self, done: StepDone, now: float) -> list[Request]:
        """The iteration in flight has ended. Sends its tokens, and returns the requests that get no further token.

        Raises: ValueError for another iteration's StepDone: a bug of the shell.
        """
        step = self.in_flight
        if step is None or step.step_id != done.step_id:
            raise ValueError(f"step {done.step_id} is done, but was not in flight")
        self.in_flight = None
        for request in self.removed:
            self._memory.drop(request)
        self.removed.clear()
        batch = step.batch
        assert batch.budget is not None
        planned = batch.budget.iteration
        self._times.observe(planned, done.duration_s)
        decode_s = self._times.decode_s(max(1, planned.num_decodes), planned.num_context_tokens)
        _take_prompt_scores(step, done)
        sampled = {request_id: row for row, request_id in enumerate(done.request_ids)}
        made: list[Row] = []
        finished: list[Request] = []
        for (request, num_fed), start in zip(batch.rows, step.starts, strict=True):
            if self._requests.get(request.request_id) is not request:
                continue  # gone meanwhile, or replaced by a newer epoch, which is in no step yet
            request.num_computed += num_fed
            self._memory.prefixes.share_computed(request, num_fed)
            row = sampled.get(request.request_id)
            if row is not None:
                request.append(done.token_ids[row], done.logprobs[row] if done.logprobs else None)
            is_decode = num_fed == 1 and row is not None
            # The chunks of a prefill sum to the time of the whole prefill, because its level's quantum covers that.
            service_s = decode_s if is_decode else self._times.prefill_s(start + num_fed) - self._times.prefill_s(start)
            self._policy.on_service(request, service_s, now)
            if request.request_id in done.failed:
                request.finish_reason = FinishReason.ERROR
                finished.append(request)
            if row is None:
                continue
            self._batcher.on_token(request, service_s)
            made.append((request, request.num_output - 1))
            if request.check_finished(self._max_tokens):
                finished.append(request)
        send_tokens(made, self._effects)
        return finished

    def validate(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        running = self.running
        assert all(request in running for request in self.removed), "a removed request is not in the step in flight"
        removed = {id(request) for request in self.removed}
        for request in running:
            is_present = self._requests.get(request.request_id) is request
            assert is_present != (id(request) in removed), f"{request.request_id} runs, but is neither here nor removed"


def _take_prompt_scores(step: Step, done: StepDone) -> None:
    """Keep what the iteration tells of its requests' prompts."""
    if done.prompt_logprobs:
        for (request, _), start, found in zip(step.batch.rows, step.starts, done.prompt_logprobs, strict=True):
            if found is not None and request.prompt_scores is not None:
                request.prompt_scores.put(start + 1, found)

"""The clients of a run: they send its requests, and record each request's outcome."""

from collections.abc import Callable, Sequence

from actorserve.core.messages import FinishReason, Open, RequestSpec, SamplingParams
from actorserve.sim.arrivals import arrivals
from actorserve.sim.config import RunConfig
from actorserve.sim.results import Outcomes
from actorserve.sim.timeline import Timeline
from actorserve.sim.workload.requests import Arrival, Prompts
from actorserve.sim.workload.traces import TraceRow

_PROGRESS_EVERY = 200  # arrivals


class Clients:
    """``send`` hands a request to the gateway. ``on_progress`` is called with the virtual time, and with how many
    requests have arrived and ended.
    """

    def __init__(
        self,
        config: RunConfig,
        trace: Sequence[TraceRow],
        timeline: Timeline,
        send: Callable[[Open], None],
        on_progress: Callable[[float, int, int], None],
    ) -> None:
        """Raises: SimulationError, WorkloadError."""
        self.outcomes = Outcomes()
        self._timeline = timeline
        self._send = send
        self._on_progress = on_progress
        self._arrivals = arrivals(config, trace)
        self._next: Arrival | None = None
        self._prompts = Prompts(compared=config.cluster.prefix_cache)
        self._sampling: dict[int, SamplingParams] = {}  # by output length
        self._awaiting_first_token: set[str] = set()  # never iterated

    @property
    def have_more(self) -> bool:
        """Whether more requests will arrive."""
        return self._next is not None

    def expect_arrival(self) -> None:
        self._next = next(self._arrivals, None)
        if self._next is not None:
            self._timeline.at(max(self._timeline.now, self._next.at_s), self._arrive)

    def on_token(self, request_id: str) -> None:
        if request_id in self._awaiting_first_token:
            self._awaiting_first_token.discard(request_id)
            self.outcomes.first_token_s[int(request_id)] = self._timeline.now

    def on_end(self, request_id: str, reason: FinishReason) -> None:
        self._awaiting_first_token.discard(request_id)
        number = int(request_id)
        self._prompts.on_end(self.outcomes.num_prompt[number])
        self.outcomes.end(number, self._timeline.now, reason)

    def tell_progress(self) -> None:
        outcomes = self.outcomes
        self._on_progress(self._timeline.now, len(outcomes), len(outcomes) - outcomes.num_open)

    def _arrive(self) -> None:
        arrival = self._next
        assert arrival is not None
        number = self.outcomes.arrive(
            self._timeline.now, arrival.prompt_tokens, arrival.output_tokens, arrival.priority
        )
        self.expect_arrival()
        sampling = self._sampling.get(arrival.output_tokens)
        if sampling is None:
            sampling = SamplingParams(seed=0, max_tokens=arrival.output_tokens)
            self._sampling[arrival.output_tokens] = sampling
        prompt = self._prompts.token_ids(arrival, number)
        spec = RequestSpec(str(number), prompt, sampling, priority=arrival.priority)
        self._awaiting_first_token.add(spec.request_id)
        self._send(Open(spec))
        if number % _PROGRESS_EVERY == 0:
            self.tell_progress()

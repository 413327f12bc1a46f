"""First tokens first, then the shortest expected remainder, both with linear ageing.

What a request waits for is its first token, and then the end of its output. So a request is ordered by the time that
this takes: the rest of its prefill, and after its first token the shortest iteration for each output token that is
still expected (``core.prediction``). Shortest expected remaining processing time is the best order for mean latencies
when lengths are known (SRPT; Schrage, 1968), and stays close to it when they are estimated.

Where nothing is known of a request, the feedback queue's rule holds: it has as much left as the quantum of the level
that it would be in, which doubles as the request goes on (``core.scheduling.mlfq``).

Ageing is linear: each second since its arrival brings a request as far forward as ``ageing`` seconds less of work do.
All requests age alike, so ageing changes no order among those present. What it bounds is overtaking: a request with
``rest_s`` to go is overtaken only by requests that come within ``rest_s / ageing`` seconds after it. Therefore none
starves, however many come.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence

from actorserve.core.messages import Attained, FinishReason
from actorserve.core.messages.values import NEWCOMER
from actorserve.core.prediction.predictor import Forecast, LengthPredictor
from actorserve.core.request import Request
from actorserve.core.timing.step_times import StepTimes

AGEING = 0.03
"""Seconds of work that a second since a request's arrival outweighs."""

_ENDED = (FinishReason.STOP, FinishReason.LENGTH)
_KEPT_SHARE = 0.25  # of an expected remainder may be served before the request's place is found anew


class _Entry:
    """What a request is ordered by: ``key``, which is ``rest_s`` and the age. ``num_kept`` decodes do not change it."""

    __slots__ = ("forecast", "key", "num_kept", "num_told", "number", "rest_s", "since_s")

    def __init__(self, number: int, since_s: float, num_told: float, forecast: Forecast) -> None:
        self.number = number  # in order of arrival
        self.since_s = since_s
        self.num_told = num_told  # output tokens that its last owner expected; 0 if unknown
        self.forecast = forecast
        self.rest_s = 0.0
        self.key = 0.0
        self.num_kept = 0


class ShortestExpected:
    """The policy, with what ``predictor`` expects."""

    reserves_output = False
    is_preemptive = True

    def __init__(self, times: StepTimes, predictor: LengthPredictor, *, ageing: float = AGEING) -> None:
        """``ageing`` must be above 0, else ValueError."""
        if not ageing > 0.0:
            raise ValueError(f"ageing is {ageing:g}; expected a number above 0")
        self._times = times
        self._predictor = predictor
        self._ageing = ageing
        self._entries: dict[Request, _Entry] = {}
        self._num_joined = 0
        self._keys: list[tuple[float, int]] = []  # sorted
        self._sorted: list[Request] = []  # in the order of their keys
        self._order: Sequence[Request] | None = None  # kept while nothing has changed

    @property
    def requests(self) -> Collection[Request]:
        return self._entries.keys()

    def add(self, request: Request, now: float, num_cached_tokens: int = 0, attained: Attained = NEWCOMER) -> None:
        self._num_joined += 1
        entry = _Entry(
            self._num_joined, now - attained.age_s, attained.expected_tokens, self._predictor.forecast(request)
        )
        self._entries[request] = entry
        self._place(request, entry, num_cached_tokens)

    def remove(self, request: Request) -> None:
        entry = self._entries.pop(request)
        self._take_out(entry)
        if request.finish_reason in _ENDED:
            entry.forecast.ended(request.num_output)

    def on_service(self, requests: Sequence[Request], service_s: float, now: float) -> Sequence[Request]:
        """A served request only comes closer to its end, and stands in front already. So its place is kept for some
        tokens.
        """
        entries = self._entries
        moving = []
        for request in requests:
            entry = entries[request]
            entry.num_kept -= 1
            if entry.num_kept <= 0:
                moving.append(request)
        return moving

    def move(self, request: Request) -> None:
        entry = self._entries[request]
        self._take_out(entry)
        self._place(request, entry, request.num_fed)

    def attained(self, request: Request, now: float) -> Attained:
        entry = self._entries[request]
        num_output = request.num_output
        rest = entry.forecast.rest(num_output)
        expected_tokens = entry.num_told if rest is None else num_output + rest
        return Attained(age_s=now - entry.since_s, expected_tokens=expected_tokens)

    def order(self, now: float) -> Sequence[Request]:
        if self._order is None:
            self._order = list(self._sorted)
        return self._order

    def next_starts_s(self, order: Sequence[Request], now: float, max_batch_requests: int) -> list[float]:
        """A request starts when all requests before it are done; as many run at once as a batch holds."""
        entries = self._entries
        starts_s = []
        ahead_s = 0.0
        for request in order:
            starts_s.append(ahead_s / max_batch_requests)
            ahead_s += entries[request].rest_s
        return starts_s

    def num_by_level(self) -> Sequence[int]:
        return ()

    def validate(self) -> None:
        """Raises: AssertionError if the order and the entries do not agree."""
        assert len(self._keys) == len(self._sorted) == len(self._entries), "each request has one place"
        assert self._keys == sorted(self._keys), "the places are in order"
        for place, request in zip(self._keys, self._sorted, strict=True):
            entry = self._entries[request]
            assert place == (entry.key, entry.number), "each request is in its place"

    def _take_out(self, entry: _Entry) -> None:
        place = bisect_left(self._keys, (entry.key, entry.number))
        del self._keys[place]
        del self._sorted[place]
        self._order = None

    def _place(self, request: Request, entry: _Entry, num_computed: int) -> None:
        """Find a request's place, if ``num_computed`` of its tokens have KV."""
        num_tokens = request.num_tokens
        num_uncomputed, num_output = num_tokens - num_computed, num_tokens - request.num_prompt
        rest_s = 0.0
        entry.num_kept = 1
        if num_uncomputed > 1:
            rest_s += self._times.prefill_s(num_uncomputed, num_computed)
        if num_output > 0:
            rest = self._rest(entry, num_output)
            rest_s += rest * self._times.min_iteration_s
            if num_uncomputed <= 1:
                entry.num_kept = max(1, int(_KEPT_SHARE * rest))
        entry.rest_s = rest_s
        entry.key = rest_s + self._ageing * entry.since_s
        place = bisect_left(self._keys, (entry.key, entry.number))
        self._keys.insert(place, (entry.key, entry.number))
        self._sorted.insert(place, request)
        self._order = None

    def _rest(self, entry: _Entry, num_output: int) -> float:
        """The output tokens that are expected to follow."""
        rest = entry.forecast.rest(num_output)
        if rest is not None:
            return max(rest, 1.0)
        if entry.num_told > num_output:
            return entry.num_told - num_output
        return float(1 << (num_output + 1).bit_length() - 1)

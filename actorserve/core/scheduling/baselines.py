"""Policies to compare our skip-join queue with: the paper's own, its two strawmen (section 4.1), and an oracle."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar

from actorserve.core.messages import Attained
from actorserve.core.messages.values import NEWCOMER
from actorserve.core.request import Request
from actorserve.core.scheduling.mlfq import SkipJoinMLFQ
from actorserve.core.timing.step_times import StepTimes


class PaperSkipJoinMLFQ(SkipJoinMLFQ):
    """Without our two rules: all requests that are due are promoted at once, and only a used-up quantum moves one."""

    promotes_singly: ClassVar[bool] = False

    def on_service(self, requests: Sequence[Request], service_s: float, now: float) -> Sequence[Request]:
        return self.serve(requests, service_s, now)

    def move(self, request: Request) -> None:
        self.demote(request, self._next_iteration_s(request, request.num_fed))


class NaiveMLFQ(SkipJoinMLFQ):
    """Information-agnostic: every request joins Q1, and a used-up quantum costs one level, however long the next
    iteration takes. A request does not go up when its prompt has been computed.
    """

    def add(self, request: Request, now: float, num_cached_tokens: int = 0, attained: Attained = NEWCOMER) -> None:
        self.join(request, 0.0, now, attained)

    def _next_iteration_s(self, request: Request, num_computed: int) -> float:
        return 0.0


class _ShortestFirst(ABC):
    """Preemptive, the shortest time first; ties go by arrival. Without promotion long requests starve."""

    reserves_output = False
    is_preemptive = True

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._times_s: dict[Request, float] = {}  # in order of arrival
        self._order: list[Request] | None = None

    @property
    def requests(self) -> Collection[Request]:
        return self._times_s.keys()

    @abstractmethod
    def _time_s(self, request: Request, num_computed: int) -> float:
        """The time that ``request`` is ordered by, if ``num_computed`` of its tokens have KV."""

    def add(self, request: Request, now: float, num_cached_tokens: int = 0, attained: Attained = NEWCOMER) -> None:
        self._times_s[request] = self._time_s(request, num_cached_tokens)
        self._order = None

    def remove(self, request: Request) -> None:
        del self._times_s[request]
        self._order = None

    def on_service(self, requests: Sequence[Request], service_s: float, now: float) -> Sequence[Request]:
        """Service alone changes no place."""
        return ()

    def move(self, request: Request) -> None:
        self._times_s[request] = self._time_s(request, request.num_fed)
        self._order = None

    def attained(self, request: Request, now: float) -> Attained:
        return NEWCOMER

    def order(self, now: float) -> Sequence[Request]:
        if self._order is None:
            self._order = sorted(self._times_s, key=self._times_s.__getitem__)
        return self._order

    def next_starts_s(self, order: Sequence[Request], now: float, max_batch_requests: int) -> list[float]:
        """A request starts when all requests before it are done; as many run at once as a batch holds."""
        starts_s = []
        ahead_s = 0.0
        for request in order:
            starts_s.append(ahead_s / max_batch_requests)
            ahead_s += self._times_s[request]
        return starts_s

    def num_by_level(self) -> Sequence[int]:
        return ()


class FixedPriority(_ShortestFirst):
    """Orders by the profiled prefill time of the input, which stays fixed even if a short prompt decodes for long."""

    def _time_s(self, request: Request, num_computed: int) -> float:
        return self._times.prefill_s(len(request.token_ids) - num_computed, num_computed)


class ShortestRemainingTime(_ShortestFirst):
    """SRPT: the time of the remaining prefill, plus the shortest iteration for each remaining output token.

    It is an oracle: it takes ``max_tokens`` for the length of the output, which only a simulation or a benchmark that
    ignores the end of sequence knows beforehand.
    """

    def _time_s(self, request: Request, num_computed: int) -> float:
        num_remaining = request.sampling.max_tokens - (request.num_tokens - request.num_prompt)
        num_uncomputed = request.num_tokens - num_computed
        if num_uncomputed <= 1:
            return num_remaining * self._times.min_iteration_s
        prefill_s = self._times.prefill_s(num_uncomputed, num_computed)  # makes the first output token
        return prefill_s + (num_remaining - 1) * self._times.min_iteration_s

    def on_service(self, requests: Sequence[Request], service_s: float, now: float) -> Sequence[Request]:
        """Each served request has less left to do."""
        return requests

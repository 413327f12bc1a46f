"""Local scheduling policies: the order in which an instance's requests get its next iteration."""

from collections.abc import Collection, Sequence
from typing import Protocol

from actorserve.core.messages import NEWCOMER, Attained
from actorserve.core.request import Request


class SchedulingPolicy(Protocol):
    """Orders the requests of one instance, most urgent first. The order depends on the calls alone.

    The instance walks ``order`` at each iteration: it batches from the front, and evicts from the back when memory runs
    out. A request may take memory only from requests behind it. Therefore a policy that runs requests to completion
    keeps started requests before waiting ones. Requests of equal urgency keep their order.
    """

    @property
    def reserves_output(self) -> bool:
        """Whether a request starts only if its whole output, up to ``max_tokens``, has room as well."""
        ...

    @property
    def is_preemptive(self) -> bool:
        """Whether a new request may go before started ones, so that room is kept free for new requests."""
        ...

    @property
    def requests(self) -> Collection[Request]:
        """The requests that it orders, each once, in no particular order."""
        ...

    def add(self, request: Request, now: float, num_cached_tokens: int = 0, attained: Attained = NEWCOMER) -> None:
        """Add a new request, of whose tokens ``num_cached_tokens`` need not be computed."""
        ...

    def remove(self, request: Request) -> None: ...

    def on_service(self, requests: Sequence[Request], service_s: float, now: float) -> Sequence[Request]:
        """Count that these requests took part in an iteration and were each served for ``service_s``.

        ``service_s`` comes from the profile. For a prefill it is the chunk's part of the whole prefill, and for a
        decode one iteration of the batch's decodes without prefills.

        Returns those of them whose place in the order may change. ``move`` each before the next call of any method.
        """
        ...

    def move(self, request: Request) -> None:
        """Find the place of a request that ``on_service`` returned. It already includes the iteration's tokens."""
        ...

    def attained(self, request: Request, now: float) -> Attained:
        """The request's service and level, which travel with it to another instance."""
        ...

    def order(self, now: float) -> Sequence[Request]:
        """All requests, the most urgent first."""
        ...

    def next_starts_s(self, order: Sequence[Request], now: float, max_batch_requests: int) -> list[float]:
        """The estimated seconds until each request in ``order`` is scheduled next (FastServe, section 4.2: ENST)."""
        ...

    def num_by_level(self) -> Sequence[int]:
        """How many requests are in each level, the most urgent level first; empty without levels."""
        ...


class FirstComeFirstServed:
    """Arrival order, run to completion."""

    is_preemptive = False

    def __init__(self, *, reserves_output: bool = False) -> None:
        self.reserves_output = reserves_output
        self._requests: dict[Request, None] = {}

    @property
    def requests(self) -> Collection[Request]:
        return self._requests.keys()

    def add(self, request: Request, now: float, num_cached_tokens: int = 0, attained: Attained = NEWCOMER) -> None:
        self._requests[request] = None

    def remove(self, request: Request) -> None:
        del self._requests[request]

    def on_service(self, requests: Sequence[Request], service_s: float, now: float) -> Sequence[Request]:
        """Service does not count here."""
        return ()

    def move(self, request: Request) -> None:
        """Service moves no request."""

    def attained(self, request: Request, now: float) -> Attained:
        return NEWCOMER

    def order(self, now: float) -> Sequence[Request]:
        return list(self._requests)

    def next_starts_s(self, order: Sequence[Request], now: float, max_batch_requests: int) -> list[float]:
        """The indices, because only the order of the times counts."""
        return [float(index) for index in range(len(order))]

    def num_by_level(self) -> Sequence[int]:
        return ()

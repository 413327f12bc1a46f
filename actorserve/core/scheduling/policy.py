"""Local scheduling policies: the order in which an instance's requests get its next iteration."""

from collections.abc import Sequence
from typing import Protocol

from actorserve.core.messages import NEWCOMER, Attained
from actorserve.core.request import Request


class SchedulingPolicy(Protocol):
    """Orders the requests of one instance, most urgent first. Deterministic in its calls.

    The instance walks ``order`` at each iteration: it batches from the front, and takes memory from the back where it
    runs out. A request may take memory only from those behind it, so a policy that runs to completion keeps each that
    has started before all that wait. The order inside equal urgency is stable.
    """

    @property
    def reserves_output(self) -> bool:
        """Whether a request starts only where its whole output, up to ``max_tokens``, has room as well."""
        ...

    @property
    def is_preemptive(self) -> bool:
        """Whether one that comes may go before those that have started, so that room is kept for it."""
        ...

    def add(self, request: Request, now: float, num_cached_tokens: int = 0, attained: Attained = NEWCOMER) -> None:
        """A request comes; so many tokens of its prompt need not be computed."""
        ...

    def remove(self, request: Request) -> None: ...

    def on_service(self, request: Request, service_s: float, now: float) -> None:
        """``request`` took part in an iteration, and was served for ``service_s``: what the profile says of its own
        prefill chunk, as a part of the whole prefill, or of one iteration of the batch's decodes without the prefills.
        Its tokens count already.
        """
        ...

    def attained(self, request: Request, now: float) -> Attained:
        """What travels with the request to another instance."""
        ...

    def order(self, now: float) -> Sequence[Request]: ...

    def next_starts_s(self, order: Sequence[Request], now: float, max_batch_requests: int) -> list[float]:
        """The estimated time to the next scheduling of each in ``order`` (FastServe, section 4.2: ENST)."""
        ...


class FirstComeFirstServed:
    """Arrival order, run to completion."""

    is_preemptive = False

    def __init__(self, *, reserves_output: bool = False) -> None:
        self.reserves_output = reserves_output
        self._requests: dict[Request, None] = {}

    def add(self, request: Request, now: float, num_cached_tokens: int = 0, attained: Attained = NEWCOMER) -> None:
        self._requests[request] = None

    def remove(self, request: Request) -> None:
        del self._requests[request]

    def on_service(self, request: Request, service_s: float, now: float) -> None:
        """Service does not count here."""

    def attained(self, request: Request, now: float) -> Attained:
        return NEWCOMER

    def order(self, now: float) -> Sequence[Request]:
        return list(self._requests)

    def next_starts_s(self, order: Sequence[Request], now: float, max_batch_requests: int) -> list[float]:
        """Only the order counts."""
        return [float(index) for index in range(len(order))]

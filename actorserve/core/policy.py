"""Local scheduling policies: the order in which an instance's requests get its next iteration."""

from collections.abc import Sequence
from typing import Protocol

from actorserve.core.request import Request


class SchedulingPolicy(Protocol):
    """Orders the requests of one instance, most urgent first. Deterministic in its calls.

    The instance walks ``order`` at each iteration: it batches from the front, and preempts from the back when blocks
    run out. The order inside equal urgency is stable.
    """

    def add(self, request: Request, now: float) -> None: ...

    def remove(self, request: Request) -> None: ...

    def on_service(self, request: Request, service_s: float, now: float) -> None:
        """``request`` took part in an iteration and was served for ``service_s``."""
        ...

    def order(self, now: float) -> Sequence[Request]: ...


class FirstComeFirstServed:
    """Arrival order, run to completion."""

    def __init__(self) -> None:
        self._requests: dict[Request, None] = {}

    def add(self, request: Request, now: float) -> None:
        self._requests[request] = None

    def remove(self, request: Request) -> None:
        del self._requests[request]

    def on_service(self, request: Request, service_s: float, now: float) -> None:
        """Service does not count here."""

    def order(self, now: float) -> Sequence[Request]:
        return list(self._requests)

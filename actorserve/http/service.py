"""What the HTTP face needs from the rest of the gateway: something that answers requests with tokens."""

from collections.abc import Mapping
from typing import Protocol

from actorserve.core.gateway.shown import Shown
from actorserve.core.messages import LoadReport, ModelInfo, RequestSpec
from actorserve.http.stream import AnswerStream


class Service(Protocol):
    """The gateway's sessions, as the HTTP face sees them. Every call is made on the event loop, and never blocks."""

    @property
    def model(self) -> ModelInfo | None:
        """The served model; None until a worker has come up for the first time."""
        ...

    @property
    def num_instances(self) -> int:
        """How many workers are up now. The gateway is healthy if there is at least one."""
        ...

    def submit(self, request: RequestSpec, stream: AnswerStream) -> None:
        """Begin to serve ``request``, whose id is new. The caller releases it in any case.

        ``stream`` gets its ``Deliver`` effects, any number of them, and then exactly one ``End``; no ``End`` follows a
        release. The requests of one answer share a stream.
        """
        ...

    def release(self, request_id: str, *, is_complete: bool = False) -> None:
        """The client wants nothing more of this request: free all that is held for it within one iteration.
        ``is_complete``: the answer's text has come to its own end, so that its length tells how long answers are.

        May be called any number of times, and also after the end.
        """
        ...

    @property
    def num_unplaced(self) -> int:
        """How many requests that were submitted here have no worker yet."""
        ...

    @property
    def coordinator_term(self) -> int:
        """The term of the coordinator that places this gateway's requests; 0 while none does."""
        ...

    def shown_loads(self) -> Mapping[str, LoadReport]:
        """The latest load report of each instance that is up, by the instance's name. Empty on all hosts but one, so
        that each instance is shown once.
        """
        ...

    def shown(self, most_requests: int) -> Shown:
        """All instances that are up, and at most so many of the requests that were submitted here, for a page that
        people watch."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Further counts that only grow, by name (``protocol_errors``): ``/metrics`` shows them as
        ``actorserve_<name>_total``. Names consist of lower-case letters, digits and underscores."""
        ...

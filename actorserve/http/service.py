"""What the HTTP face needs from the rest of the gateway: somebody who answers requests with streams of tokens."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from actorserve.core.messages import (
    FinishReason,
    LoadReport,
    ModelInfo,
    RefusalReason,
    RequestSpec,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class Produced:
    """The next tokens of a request, in order and each once. ``logprobs`` is empty or as long as ``token_ids``.

    ``num_cached_tokens``: with a request's first tokens, how many of its prompt's were found in a prefix cache; else 0.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """The last item of a stream. With ``refusal`` the request was never served; retry after that many seconds."""

    reason: FinishReason
    refusal: RefusalReason | None = None
    retry_after_s: float = 0.0


class TokenStream(Protocol):
    """One request's tokens as they are made: ``Produced`` any number of times, then exactly one ``Ended``.

    Items wait until they are taken, however slow the client: there are never more than ``max_tokens`` tokens, so what
    waits is bounded.
    """

    def __aiter__(self) -> AsyncIterator[Produced | Ended]: ...

    def release(self) -> None:
        """The client wants nothing more: free all that is held for it within one iteration.

        May be called at any time and any number of times, also after the end. Never blocks.
        """
        ...


class Service(Protocol):
    """The gateway's sessions, as the HTTP face sees them. All of it is called on the event loop, and never blocks."""

    @property
    def model(self) -> ModelInfo | None:
        """What is served; None until a worker has come up for the first time."""
        ...

    @property
    def num_instances(self) -> int:
        """How many workers are up now; with none of them, nothing is healthy."""
        ...

    def submit(self, request: RequestSpec) -> TokenStream:
        """Begin to answer ``request``, whose id is new. The caller releases the stream, whatever happens."""
        ...

    def loads(self) -> Mapping[str, LoadReport]:
        """The latest load report of each instance that is up, by its name."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Further counts that only grow, by name (``protocol_errors``): ``/metrics`` shows them as
        ``actorserve_<name>_total``. Names are of lower-case letters, digits and underscores."""
        ...

"""What the core asks its shell to do, as values. A shell is the real process, the simulator, or a test."""

from dataclasses import dataclass

from actorserve.core.messages import (
    FinishReason,
    KVAccess,
    KVTicket,
    Message,
    Peer,
    RefusalReason,
    RequestSpec,
    StepPlan,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to this incarnation of a peer; may be lost if the peer dies, never duplicated by the core."""

    to: Peer
    message: Message


@dataclass(frozen=True, slots=True)
class AddToEngine:
    """Let the engine know a request's tokens and sampling before its first step."""

    request: RequestSpec


@dataclass(frozen=True, slots=True)
class DropFromEngine:
    """The engine may forget the request; no later step names it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run one iteration; answered by a StepDone with the same ``step_id``."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy blocks of KV to the host's pool, block by block in order; answered by a CopyDone.

    It goes beside the iterations: no step writes these blocks before it is done, and none reads the host's.
    """

    copy_id: int
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """The way back; no step touches these device blocks before it is done."""

    copy_id: int
    host_blocks: tuple[int, ...]
    device_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Copy what a ticket names, but for its first ``num_skipped`` blocks, from another worker's pool into these blocks
    of the device's own pool, or of the host's, in order; answered by a CopyDone, or a CopyFailed.

    It goes beside the iterations: no step touches these blocks before it is done. ``is_urgent``: its request stands
    still, so no bandwidth budget holds it back.
    """

    copy_id: int
    source: Peer
    access: KVAccess
    ticket: KVTicket
    num_skipped: int
    blocks: tuple[int, ...]
    is_urgent: bool
    into_host: bool = False


@dataclass(frozen=True, slots=True)
class Meet:
    """Get to know this worker, of whom the coordinator has told; a PeerUp follows if it is there. Repeatable."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Have one more worker started; it makes itself known when it is ready."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand newly made tokens, in order and each once, to the client's stream. ``logprobs`` is empty or as long.

    With the first of them comes how many of the prompt's tokens were found in a prefix cache.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """Tell the client's stream that it is over. The last effect for a request, exactly once."""

    request_id: str
    reason: FinishReason
    refusal: RefusalReason | None = None
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Drained:
    """The last request has left a draining instance; its process may end. Once."""


@dataclass(frozen=True, slots=True)
class Available:
    """A gateway has met its first worker: requests can be served. Once."""


Effect = (
    Available
    | Drained
    | Send
    | AddToEngine
    | DropFromEngine
    | RunStep
    | SwapOut
    | SwapIn
    | Fetch
    | Meet
    | StartWorker
    | Deliver
    | End
)

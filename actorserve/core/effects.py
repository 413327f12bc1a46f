"""What the core asks its shell to do, as values. A shell is the real process, the simulator, or a test."""

from actorserve.core.messages import (
    Command,
    Energy,
    FinishReason,
    InstanceRole,
    KVAccess,
    KVTicket,
    Message,
    Outcome,
    Peer,
    PromptLogprobs,
    RefusalReason,
    RequestSpec,
    StepPlan,
    TokenLogprobs,
)
from actorserve.core.messages.value import value


@value
class Send:
    """Send ``message`` to this incarnation of a peer. It may be lost if the peer dies; the core never duplicates it."""

    to: Peer
    message: Message


@value
class AddToEngine:
    """Tell the engine a request's tokens and sampling before its first step.

    A request with a grammar is answered by a GrammarReady, and no step names the request before.
    """

    request: RequestSpec


@value
class DropFromEngine:
    """The engine may forget the request, because no later step names it."""

    request_id: str


@value
class RunStep:
    """Run one iteration; answered by a StepDone with the same ``step_id``."""

    plan: StepPlan


@value
class SwapOut:
    """Copy blocks of KV to the host's pool, block by block in order; answered by a CopyDone.

    It runs in parallel to the iterations. Until it is done, no step writes these device blocks or reads these host
    blocks.
    """

    copy_id: int
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


@value
class SwapIn:
    """Copy blocks of KV back to the device's pool; no step touches these device blocks before the CopyDone."""

    copy_id: int
    host_blocks: tuple[int, ...]
    device_blocks: tuple[int, ...]


@value
class Fetch:
    """Copy a ticket's blocks, except its first ``num_skipped``, from another worker's pool into ``blocks``, in order.

    ``blocks`` lie in the device's own pool, or in the host's with ``into_host``. Answered by a CopyDone or a
    CopyFailed. The copy runs in parallel to the iterations: no step touches these blocks before the answer.
    ``is_urgent``: the request is paused, so no bandwidth budget delays the copy.
    """

    copy_id: int
    source: Peer
    access: KVAccess
    ticket: KVTicket
    num_skipped: int
    blocks: tuple[int, ...]
    is_urgent: bool
    into_host: bool = False


@value
class CancelFetch:
    """End this Fetch soon, because nothing needs its blocks any more. The Fetch is answered as before."""

    copy_id: int


@value
class Meet:
    """Connect to this worker, which the coordinator has named. A PeerUp follows if the worker is alive. Repeatable."""

    peer: Peer


@value
class StartWorker:
    """Have one more worker started; it announces itself when it is ready. The coordinator then gives it ``role``; None:
    it keeps the role that is configured.
    """

    role: InstanceRole | None = None


@value
class SetCaps:
    """Set these power limits, in this order. The next PowerRead shows what came of it."""

    devices: tuple[str, ...]
    caps_watts: tuple[float, ...]


@value
class PutBackLimits:
    """Give every device the power limit that it had before its first cap. The next PowerRead shows what came of it."""


@value
class ReadPower:
    """Read all devices; answered by a PowerRead."""


@value
class SetLogLevel:
    """Log at this level from now on: one of ``core.operations.verbs.LOG_LEVELS``."""

    level: str


@value
class ReloadKeys:
    """Read the files of keys again. A file that cannot be read changes nothing, and is logged.

    ``told`` gets an Answer to this command with what was read; None: no process is told. ``LOCAL`` is our own core.
    """

    told: Peer | None = None
    command_id: str = ""


@value
class Audit:
    """Write one line about an operator's act to the audit file."""

    caller: str
    command: Command
    outcome: Outcome
    text: str


@value
class Deliver:
    """Hand new tokens to the client's stream, in order and each token once. ``logprobs`` is empty, or has one entry per
    token.

    ``num_cached_tokens``, set with the first tokens, is how many of the prompt's tokens a prefix cache had computed.
    ``prompt_logprobs`` come with the first tokens if the request wants them. ``worker`` and ``kind``, set with the
    first tokens of each epoch, are the name and the kind of the worker that made them. ``queued_s``, set with the first
    tokens of all, is how long the request waited for its first iteration, since its client sent it.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    worker: str = ""
    queued_s: float = 0.0
    kind: str = ""


@value
class End:
    """End the client's stream. The last effect for a request, exactly once. ``energy`` is what its workers spent; None:
    not known.
    """

    request_id: str
    reason: FinishReason
    refusal: RefusalReason | None = None
    retry_after_s: float = 0.0
    energy: Energy | None = None


@value
class Drained:
    """The last request has left a draining instance, so its process may end. Once. ``comes_back``: and start again."""

    comes_back: bool = False


@value
class Available:
    """A gateway has met its first worker, so it can serve requests. Once."""


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
    | CancelFetch
    | Meet
    | StartWorker
    | SetCaps
    | PutBackLimits
    | ReadPower
    | Audit
    | SetLogLevel
    | ReloadKeys
    | Deliver
    | End
)


class Effects(list[Effect]):
    """What the current input leads to, in order. The parts of a core share one list and append to it."""

    def send(self, to: Peer, message: Message) -> None:
        self.append(Send(to, message))

    def take(self) -> list[Effect]:
        """The effects so far; the list is empty afterwards."""
        taken = list(self)
        self.clear()
        return taken

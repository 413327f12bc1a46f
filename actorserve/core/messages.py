"""The one vocabulary: every message that crosses the wire or enters the core, as a frozen value.

The wire encodes these as ``[tag, *fields]`` (``actorserve.wire.codec``), the core handles them, the simulator and a
recorded log replay them. Hot messages are columnar: one object for a whole batch, a column per field. Durations may
cross hosts, timestamps never do.

Roles: ``g`` gateway, ``c`` coordinator, ``w`` worker; in a migration ``s`` is the source and ``d`` the destination, two
workers. ``g -> w`` in a docstring says who sends to whom; *local* messages never leave the process that made them.
"""

from dataclasses import dataclass

from actorserve.core.migration_messages import (
    Checkpoint as Checkpoint,
    Confirmed as Confirmed,
    Copied as Copied,
    Declined as Declined,
    Guarded as Guarded,
    GuardedBy as GuardedBy,
    HandOver as HandOver,
    Keep as Keep,
    MigrateTo as MigrateTo,
    Offer as Offer,
    Stage as Stage,
    Withdrawn as Withdrawn,
)
from actorserve.core.values import (
    LOCAL as LOCAL,
    NEWCOMER as NEWCOMER,
    Attained as Attained,
    DeclineReason as DeclineReason,
    FinishReason as FinishReason,
    KVAccess as KVAccess,
    KVTicket as KVTicket,
    MigrationId as MigrationId,
    ModelInfo as ModelInfo,
    Peer as Peer,
    RefusalReason as RefusalReason,
    RequestSpec as RequestSpec,
    Role as Role,
    SamplingParams as SamplingParams,
    Speed as Speed,
    TokenLogprobs as TokenLogprobs,
)

PROTOCOL_VERSION = 4


# --- membership ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Any -> any, first on every link: who I am, where to reach me, what I serve.

    ``kind`` names the bits a worker makes (weights, numeric mode, kernels, ISA or GPU, threads): workers of one kind
    give the same tokens. Empty for gateways and the coordinator, as are ``model``, ``speed`` and ``kv``.
    """

    protocol_version: int
    role: Role
    address: str
    kind: str = ""
    model: ModelInfo | None = None
    answers: int = 0  # the receiver's incarnation that asked; 0 asks for an answer
    speed: Speed | None = None
    kv: KVAccess | None = None


@dataclass(frozen=True, slots=True)
class Members:
    """c -> all: the processes now known, as parallel columns. Peers connect to whom they do not know yet."""

    names: tuple[str, ...]
    incarnations: tuple[int, ...]
    roles: tuple[Role, ...]
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Any -> any peer: I am alive. Silence for longer than the death watch's patience is death."""


@dataclass(frozen=True, slots=True)
class PeerUp:
    """Local: the death watch met ``peer`` (a new incarnation ends the old one first, with a PeerDown)."""

    peer: Peer
    role: Role
    kind: str = ""
    model: ModelInfo | None = None
    speed: Speed | None = None
    kv: KVAccess | None = None


@dataclass(frozen=True, slots=True)
class PeerDown:
    """Local: ``peer`` has been silent too long, said goodbye, or was replaced. This incarnation never comes back.

    One exception: a process that was fenced (``Fenced``) rejoins as a new incarnation of itself. Its own core sees
    every peer go down first; then the same incarnations may come up again, for they now meet somebody new.
    """

    peer: Peer


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Any -> any: I am leaving in order; do not wait for my heartbeats."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """Any -> any: I hold your incarnation for dead (it was silent too long, or is older than one that I know).

    Nothing it says is heard any more; it has to rejoin as an incarnation above ``incarnation``.
    """

    incarnation: int


# --- placement -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """g -> c: choose an instance for this request. Repeatable: the same (request, epoch) gets the same answer.

    ``num_tokens`` counts what must be prefilled (prompt and output so far). ``kind`` is the kind that made the tokens
    so far ("" when there are none): an instance of that kind is preferred, so that the answer does not change.
    ``avoid`` is the instance that just failed this request, which the coordinator may not have noticed yet.
    ``waited_s`` is how long it has waited elsewhere since it came or got its last token. ``prefix_names`` are those of
    the prompt's beginnings, the shortest first (``core.prefix_map``).
    """

    request_id: str
    epoch: int
    num_tokens: int
    priority: int = 0
    kind: str = ""
    avoid: Peer | None = None
    waited_s: float = 0.0
    prefix_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """c -> g: start it there. ``waited_s`` is how long it waited in the cluster's queue."""

    request_id: str
    epoch: int
    instance: Peer
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Refused:
    """c -> g, w -> g: not taken, or given back, and nothing is held for it. What was given back is repeated until the
    gateway releases it, and has ``attained`` so much here.
    """

    request_id: str
    epoch: int
    reason: RefusalReason
    retry_after_s: float
    attained: Attained = NEWCOMER


@dataclass(frozen=True, slots=True)
class Unplace:
    """g -> c: the client left before the request was started; forget it."""

    request_id: str
    epoch: int


# --- a request's life on a worker ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """g -> w: own this request under ``epoch``. A repeat is answered again; an older epoch is dropped.

    ``migration``: its last owner handed it over, and its KV was copied here under this name.
    """

    epoch: int
    request: RequestSpec
    attained: Attained = NEWCOMER
    migration: MigrationId | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """w -> g: the request is mine (queued or running)."""

    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """w -> g: one iteration's output for all of a gateway's requests, as parallel columns.

    ``positions`` are output positions (0 is the first generated token). ``logprobs`` is empty, or one entry a row.
    ``num_cached_tokens`` is empty, or says at each row of position 0 how many of the prompt's tokens were found in the
    prefix cache (0 at other rows).
    """

    request_ids: tuple[str, ...]
    epochs: tuple[int, ...]
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    num_cached_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """w -> g: no more tokens; ``num_output_tokens`` were made in all. Repeated until the gateway releases it."""

    request_id: str
    epoch: int
    reason: FinishReason
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Release:
    """g -> w: I want nothing more of this request at this or any older epoch: forget it and free its blocks.

    One message for every ending: the acknowledgement of Finished, a stop string, a client that left, and the fencing
    of an owner that was thought dead.
    """

    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Resend:
    """g -> w: tokens from output position ``from_position`` on never arrived."""

    request_id: str
    epoch: int
    from_position: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """w -> c and g, numbered: an instance's load as its own scheduler sees it.

    ``virtual_usage_bytes`` is the sum of V over its requests (``core.freeness``). ``accepted`` names the requests that
    arrived since the previous report, so that the coordinator can drop them from its own account of what is under way.
    ``num_tokens_looked_up`` and ``num_tokens_found`` count, over all requests ever admitted, tokens that were looked
    up in the prefix cache, and those found there; recomputing after a preemption does not count.

    ``kv_*`` is the device's pool, ``host_*`` the one that KV is swapped to. ``kv_needed_bytes`` is the whole KV of all
    started requests, wherever it lies. ``num_swapped`` requests lie on the host now; ``num_swap_outs`` and
    ``swapped_bytes`` (both ways) were in all, and requests were due for the batch but still being copied for
    ``swap_blocked_s`` in all. ``num_migrating`` requests are on their way, in and out; of those that were on their way
    out, ``num_migrated`` were handed over, of ``migrated_bytes`` of KV, and ``num_migrations_failed`` stayed.
    ``kv_reserved_bytes``, a part of the virtual usage, is kept for those on their way in; ``kv_wanted_bytes`` is the
    demand of all that wait, of which the virtual usage holds only the first one's. ``checkpointed_bytes`` were copied
    into another worker's host memory.
    """

    sequence: int
    num_running: int
    num_waiting: int
    kv_total_bytes: int
    kv_used_bytes: int
    virtual_usage_bytes: int
    bytes_per_block: int
    tokens_per_block: int
    num_preemptions: int
    accepted: tuple[str, ...] = ()
    draining: bool = False
    num_tokens_looked_up: int = 0
    num_tokens_found: int = 0
    host_total_bytes: int = 0
    host_used_bytes: int = 0
    kv_needed_bytes: int = 0
    num_swapped: int = 0
    num_swap_outs: int = 0
    swapped_bytes: int = 0
    swap_blocked_s: float = 0.0
    num_migrating: int = 0
    num_migrated: int = 0
    num_migrations_failed: int = 0
    migrated_bytes: int = 0
    kv_reserved_bytes: int = 0
    kv_wanted_bytes: int = 0
    checkpointed_bytes: int = 0


# --- between an instance and its engine (local) ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration, as parallel columns over its requests: prefill chunks and decode tokens share it.

    Row r feeds ``token_ids[r]`` at absolute positions ``starts[r]``, ``starts[r] + 1``, ...; their KV goes to the
    slots that ``block_tables[r]`` gives (position p lies in block ``block_tables[r][p // tokens_per_block]``).
    ``samples[r]`` says whether the chunk reaches the request's last token, so that the next one is sampled.
    """

    step_id: int
    request_ids: tuple[str, ...]
    starts: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...]
    block_tables: tuple[tuple[int, ...], ...]
    samples: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class StepDone:
    """Local: the engine finished ``step_id``. Columns hold the sampled rows; ``positions`` are output positions."""

    step_id: int
    duration_s: float
    request_ids: tuple[str, ...]
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True)
class CopyDone:
    """Local: the engine finished the copy ``copy_id``, between device and host or from another worker."""

    copy_id: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class CopyFailed:
    """Local: the copy ``copy_id`` from another worker failed, and writes nothing any more."""

    copy_id: int


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Local: memory has room for so many of the pool's blocks now, those that were ever written included."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """Local: a worker that was to be started will not come. Not each that fails is known, so waiting has its bounds."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Local: the deadline that ``next_deadline`` named has come."""


@dataclass(frozen=True, slots=True)
class Drain:
    """c -> w, or local: finish what runs or move it elsewhere, take nothing new, and end."""


# --- between the HTTP face and the gateway's sessions (local) --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """Local: a client's request has come."""

    request: RequestSpec


@dataclass(frozen=True, slots=True)
class Close:
    """Local: the client wants nothing more (it left, or a stop string ended the text)."""

    request_id: str


Message = (
    Hello
    | Members
    | Heartbeat
    | PeerUp
    | PeerDown
    | Goodbye
    | Fenced
    | Place
    | Placed
    | Refused
    | Unplace
    | Start
    | Started
    | Tokens
    | Finished
    | Release
    | Resend
    | LoadReport
    | MigrateTo
    | Offer
    | Stage
    | Copied
    | Declined
    | Withdrawn
    | HandOver
    | Keep
    | GuardedBy
    | Checkpoint
    | Confirmed
    | Guarded
    | StepDone
    | CopyDone
    | CopyFailed
    | MemoryLimit
    | StartFailed
    | Tick
    | Drain
    | Open
    | Close
)

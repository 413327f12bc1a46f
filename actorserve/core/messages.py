"""The one vocabulary: every message that crosses the wire or enters the core, as a frozen value.

The wire encodes these as ``[tag, *fields]`` (``actorserve.wire.codec``), the core handles them, the simulator and a
recorded log replay them. Hot messages are columnar: one object for a whole batch, a column per field. Durations may
cross hosts, timestamps never do.

Roles: ``g`` gateway, ``c`` coordinator, ``w`` worker; in a migration ``s`` is the source and ``d`` the destination, two
workers. ``g -> w`` in a docstring says who sends to whom; *local* messages never leave the process that made them.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

PROTOCOL_VERSION = 4


class Peer(NamedTuple):
    """A process as others know it: its stable name, and which life of it this is (grows with every start)."""

    name: str
    incarnation: int


LOCAL = Peer("", 0)
"""The sender of a message that never left its process."""


class MigrationId(NamedTuple):
    """One attempt to move a request: who gives it away, and that one's count of attempts."""

    source: Peer
    number: int


class Role(StrEnum):
    GATEWAY = "gateway"
    COORDINATOR = "coordinator"
    WORKER = "worker"


class FinishReason(StrEnum):
    """Why a request ended. ``STOP`` and ``LENGTH`` are successes; each request ends exactly once."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RefusalReason(StrEnum):
    """Why a request was not taken; the gateway turns it into an HTTP status."""

    TOO_LARGE = "too_large"  # never fits this instance, however empty
    OVERLOADED = "overloaded"  # the cluster's queue is full, or the instance has no memory for it now
    NO_INSTANCE = "no_instance"  # nobody came to serve it in time
    DRAINING = "draining"  # the instance is shutting down


class DeclineReason(StrEnum):
    """Why a destination does not take a request over; it stays where it is."""

    NO_BLOCKS = "no_blocks"  # no room for this stage
    DRAINING = "draining"
    UNREACHABLE = "unreachable"  # the source's KV can not be read from here, or reading it failed
    UNKNOWN = "unknown"  # it was given up here: too late, or never heard of


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, and when to stop. Complete: two requests with equal params and tokens go on equally.

    ``seed`` is always set (the gateway draws one where the client gave none): token ``i`` is chosen with randomness
    that depends on ``(seed, i)`` alone. ``top_k`` 0 and ``top_p`` 1.0 switch those off; temperature 0 is greedy.
    ``top_logprobs`` -1 asks for none, 0 for the chosen token's, k for the k best beside it.
    """

    seed: int
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # includes end-of-sequence, unless the client ignores it
    top_logprobs: int = -1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one position, from the model's raw logits: the chosen token's and the best others'."""

    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request, whole: enough for any worker to start it, or to carry it on from the tokens already made.

    Position ``i`` of ``prompt_token_ids + output_token_ids`` is absolute and the same on every worker.
    ``output_token_ids`` is empty at first, and holds what the client already has after a failover. Requests share KV
    only with those of the same ``cache_salt``. A lower ``priority`` is more urgent.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a worker serves. ``max_tokens`` bounds prompt + output: the model's context or the KV pool's capacity."""

    name: str
    vocab_size: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a worker is, as far as the coordinator's queue needs it: points of its profile's prefill curve (tokens,
    seconds; ``core.profile``), and the shortest iteration, which is the first quantum.
    """

    prefill_tokens: tuple[int, ...]
    prefill_s: tuple[float, ...]
    min_iteration_s: float


@dataclass(frozen=True, slots=True)
class Attained:
    """What a request had from a multi-level feedback queue so far, in durations: whoever receives it derives the level.

    ``service_s`` in all; ``quantum_s`` of the level that it was on (0: it is new, and joins by its prefill time) and
    what it used of that; ``waited_s`` since it last ran, or since it came.
    """

    service_s: float = 0.0
    quantum_s: float = 0.0
    quantum_used_s: float = 0.0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class KVAccess:
    """How another worker reads this worker's KV pools (``workers.kv_transfer``); the core only hands it on.

    Blocks can be copied between pools of one ``layout``. ``host`` names the machine, where ``shared`` (memory that can
    be mapped) and ``cuda_ipc`` (a device's memory) are of use; both may be empty. At ``address`` blocks are sent.
    """

    layout: str
    address: str
    host: str = ""
    shared: str = ""
    cuda_ipc: str = ""


@dataclass(frozen=True, slots=True)
class KVTicket:
    """Leave to read these blocks of a worker's pool once, for a stage of a migration; ``secret`` proves it
    (``core.tickets``). The blocks lie in the pool on the host where ``on_host``, else in the device's.
    """

    number: int
    stage: int
    on_host: bool
    blocks: tuple[int, ...]
    secret: str


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
    ``waited_s`` is how long it has waited elsewhere since it came or got its last token.
    """

    request_id: str
    epoch: int
    num_tokens: int
    priority: int = 0
    kind: str = ""
    avoid: Peer | None = None
    waited_s: float = 0.0


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
    attained: Attained = Attained()


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
    attained: Attained = Attained()
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
    out, ``num_migrated`` were handed over, with ``migrated_bytes`` copied, and ``num_migrations_failed`` stayed.
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


# --- migration (core.migration tells the whole story) -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MigrateTo:
    """c -> w: for the next ``ttl_s`` move requests there, of so many bytes of KV in all, one after another.

    A later one takes its place; one of 0 bytes ends it. What is under way goes on.
    """

    destination: Peer
    num_bytes: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Offer:
    """s -> d, the first stage: reserve blocks for this request, and copy what the ticket names.

    KV exists for the first ``num_computed`` of its tokens, all in the ticket's blocks. With ``is_last`` the request
    stands still, and these are all of its tokens.
    """

    number: int
    epoch: int
    gateway: Peer
    request: RequestSpec
    num_computed: int
    ticket: KVTicket
    is_last: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """s -> d, each further stage: ``token_ids`` were made since, and the ticket's blocks come after those before."""

    number: int
    token_ids: tuple[int, ...]
    num_computed: int
    ticket: KVTicket
    is_last: bool


@dataclass(frozen=True, slots=True)
class Copied:
    """d -> s: all that this stage named lies here."""

    number: int
    stage: int


@dataclass(frozen=True, slots=True)
class Declined:
    """d -> s: no; nothing is held here for it any more."""

    number: int
    reason: DeclineReason


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """s -> d: the request stays, or is gone; let go of what was reserved and copied."""

    number: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """w -> g: the owner asks that ``to`` own the request from here on. It stands still until the answer.

    Repeated until then, so it is the question "did you commit?" as well. The answer is Release (``to`` owns it, or it
    is gone) or Keep. ``number`` is that of the migration which copied its KV; 0 where it has none. The gateway must
    have ``num_output_tokens``, for ``to`` has no log-probabilities of those before.
    """

    request_id: str
    epoch: int
    to: Peer
    number: int
    num_output_tokens: int
    attained: Attained


@dataclass(frozen=True, slots=True)
class Keep:
    """g -> w: the request is not handed over; go on with it."""

    request_id: str
    epoch: int


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
    | StepDone
    | CopyDone
    | CopyFailed
    | MemoryLimit
    | Tick
    | Drain
    | Open
    | Close
)

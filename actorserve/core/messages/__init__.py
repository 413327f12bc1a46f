"""The one vocabulary: every message that crosses the wire or enters the core, as a frozen value.

The wire encodes these as ``[tag, *fields]`` (``actorserve.wire.codec``), the core handles them, the simulator and a
recorded log replay them. Hot messages are columnar: one object for a whole batch, a column per field. Durations may
cross hosts, timestamps never do.

Roles: ``g`` gateway, ``c`` coordinator, ``w`` worker, ``p`` a host's actuator of power caps, ``o`` an operator's
console; in a migration ``s`` is the source and ``d`` the destination, two workers. ``g -> w`` in a docstring means from
a gateway to a worker; *local* messages never leave the process that made them.
"""

from actorserve.core.messages.checkpoints import (
    Checkpoint as Checkpoint,
    CheckpointConfirmed as CheckpointConfirmed,
    Checkpointed as Checkpointed,
    CheckpointTo as CheckpointTo,
)
from actorserve.core.messages.engine import (
    NOT_YET as NOT_YET,
    CopyDone as CopyDone,
    CopyFailed as CopyFailed,
    GrammarReady as GrammarReady,
    MemoryLimit as MemoryLimit,
    StepDone as StepDone,
    StepPlan as StepPlan,
)
from actorserve.core.messages.lifecycle import (
    Drain as Drain,
    SetCordon as SetCordon,
    SetRole as SetRole,
    StartFailed as StartFailed,
    Tick as Tick,
)
from actorserve.core.messages.load import (
    LoadDigest as LoadDigest,
    LoadReport as LoadReport,
    WantReports as WantReports,
)
from actorserve.core.messages.membership import (
    Fenced as Fenced,
    Following as Following,
    Goodbye as Goodbye,
    Heartbeat as Heartbeat,
    Hello as Hello,
    Members as Members,
    PeerDown as PeerDown,
    PeerUp as PeerUp,
    Serve as Serve,
    Serving as Serving,
    StandBy as StandBy,
)
from actorserve.core.messages.migration import (
    Copied as Copied,
    Declined as Declined,
    HandOver as HandOver,
    Keep as Keep,
    MigrateTo as MigrateTo,
    Offer as Offer,
    Stage as Stage,
    Withdrawn as Withdrawn,
)
from actorserve.core.messages.operations import (
    ActsDone as ActsDone,
    Answer as Answer,
    Column as Column,
    Command as Command,
    Orders as Orders,
    Outcome as Outcome,
)
from actorserve.core.messages.placement import (
    Place as Place,
    Placed as Placed,
    Refused as Refused,
    Unplace as Unplace,
)
from actorserve.core.messages.power import (
    DevicePower as DevicePower,
    PowerRead as PowerRead,
    PowerReading as PowerReading,
    PowerReport as PowerReport,
    SetPowerCaps as SetPowerCaps,
)
from actorserve.core.messages.requests import (
    Close as Close,
    Finished as Finished,
    Open as Open,
    Release as Release,
    Resend as Resend,
    Start as Start,
    Started as Started,
    Tokens as Tokens,
)
from actorserve.core.messages.rows import ONE_BLOCK_A_ROW as ONE_BLOCK_A_ROW, RowShape as RowShape
from actorserve.core.messages.transfers import (
    DeclineReason as DeclineReason,
    KVTicket as KVTicket,
    Transfer as Transfer,
    TransferId as TransferId,
    TransferKind as TransferKind,
)
from actorserve.core.messages.values import (
    LOCAL as LOCAL,
    MAX_GRAMMAR_BYTES as MAX_GRAMMAR_BYTES,
    MAX_MEMORY_NAME_BYTES as MAX_MEMORY_NAME_BYTES,
    NEWCOMER as NEWCOMER,
    NOTHING_SPENT as NOTHING_SPENT,
    Attained as Attained,
    Cordon as Cordon,
    Energy as Energy,
    FinishReason as FinishReason,
    InstanceRole as InstanceRole,
    KVAccess as KVAccess,
    ModelInfo as ModelInfo,
    Peer as Peer,
    PromptLogprobs as PromptLogprobs,
    RefusalReason as RefusalReason,
    RequestSpec as RequestSpec,
    Role as Role,
    SamplingParams as SamplingParams,
    Speed as Speed,
    TokenLogprobs as TokenLogprobs,
    WorkerInfo as WorkerInfo,
    total_energy as total_energy,
)

PROTOCOL_VERSION = 15
OLDEST_PROTOCOL_VERSION = 15
"""Processes of this version, of PROTOCOL_VERSION and of the next one work together, so that a cluster can be upgraded
while it serves: each version works with its neighbours. (Version 14 works only with itself.) To keep that, a new field
comes last, has a default, and is listed in ``wire.codec``, and a message's meaning never changes. A process drops and
counts messages that it does not know, so the sender must not depend on them.
"""

TransferMessage = Offer | Stage | Copied | Declined | Withdrawn | Checkpoint | CheckpointConfirmed
"""Messages between two workers about one transfer of KV. ``transfer.kind`` tells which of a worker's participants gets
them.
"""

Message = (
    Hello
    | Members
    | Heartbeat
    | PeerUp
    | PeerDown
    | Goodbye
    | Fenced
    | Serving
    | Following
    | Serve
    | StandBy
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
    | LoadDigest
    | WantReports
    | MigrateTo
    | Offer
    | Stage
    | Copied
    | Declined
    | Withdrawn
    | HandOver
    | Keep
    | CheckpointTo
    | Checkpoint
    | CheckpointConfirmed
    | Checkpointed
    | StepDone
    | GrammarReady
    | CopyDone
    | CopyFailed
    | MemoryLimit
    | StartFailed
    | Tick
    | Drain
    | SetCordon
    | SetRole
    | Command
    | Answer
    | ActsDone
    | Orders
    | SetPowerCaps
    | PowerReport
    | PowerRead
    | PowerReading
    | Open
    | Close
)

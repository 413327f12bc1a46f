"""What a migration's source keeps of each request that leaves, and of where requests are to go."""

from dataclasses import dataclass
from enum import Enum, auto

from actorserve.core.messages import Peer, TransferId
from actorserve.core.request import Request


class Phase(Enum):
    """How far a move has come."""

    COPYING = auto()  # a stage was offered, and is not copied yet
    AWAITING = auto()  # of a handoff: the prompt's next chunk has not ended
    LAST_DUE = auto()  # the last stage begins once the steps in flight have ended
    HANDING_OVER = auto()  # the gateway was asked


@dataclass(slots=True, eq=False)
class Outgoing:
    """A request that moves away.

    ``blocks`` is the list object of its blocks when the move began: if the request has another list, it was preempted.
    The first ``num_offered`` rows of it are copied or being copied. The destination knows ``num_told`` of its tokens.
    ``is_handoff``: it began with the prompt.
    """

    id: TransferId
    request: Request
    to: Peer
    phase: Phase
    blocks: list[int]
    deadline_s: float
    is_handoff: bool = False
    stage: int = 0
    num_offered: int = 0
    num_told: int = 0
    is_last: bool = False
    began_s: float = 0.0  # the current stage
    stage_bytes: int = 0
    kv_bytes: int = 0  # of all of its tokens, when the gateway was asked


@dataclass(slots=True)
class Target:
    """Where the coordinator wants requests to go, and how many bytes of KV it still wants moved."""

    to: Peer
    num_bytes: int
    until_s: float
    decoding_only: bool

"""What a migration's source keeps of each request that leaves, and of where requests are to go."""

from dataclasses import dataclass
from enum import Enum, auto

from actorserve.core.messages import KVTicket, Offer, Peer, Stage, TransferId
from actorserve.core.request import Request


class Phase(Enum):
    """How far a move has come."""

    COPYING = auto()  # a stage was offered, and is not copied yet
    AWAITING = auto()  # of a handoff: the prompt's next chunk has not ended
    LAST_DUE = auto()  # the last stage begins once the steps in flight have ended
    ALL_COPIED = auto()  # of a handoff: the step whose KV was copied has not ended for this side yet
    HANDING_OVER = auto()  # the gateway was asked


@dataclass(slots=True, eq=False)
class Outgoing:
    """A request that moves away.

    ``blocks`` is the list object of its blocks when the move began: if the request has another list, it was preempted.
    The first ``num_offered`` rows of it are copied or being copied. The destination knows ``num_told`` of its tokens.
    ``is_handoff``: it began with the prompt. ``followed``: the blocks of the last stage, if that was offered while a
    step computes their KV; they lie in ``blocks`` from ``followed_from`` on.
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
    followed: list[int] | None = None
    followed_from: int = 0
    began_s: float = 0.0  # the current stage
    stage_bytes: int = 0
    kv_bytes: int = 0  # of all of its tokens, when the gateway was asked

    @property
    def has_followed_blocks(self) -> bool:
        """Whether the request still has the ``followed`` blocks. When their step ends, it gives those up whose content
        another request has computed at the same time (``core.kv.prefix_cache``).
        """
        followed = self.followed or []
        return self.request.blocks[self.followed_from : self.followed_from + len(followed)] == followed

    def message(self, num_computed: int, ticket: KVTicket, computing_s: float) -> Offer | Stage:
        """What tells the destination of the current stage."""
        request = self.request
        if self.stage == 0:
            spec = request.spec_now()
            return Offer(request.epoch, request.gateway, spec, num_computed, ticket, self.is_last, computing_s)
        token_ids = tuple(request.token_ids[self.num_told :])
        return Stage(token_ids, num_computed, ticket, self.is_last, computing_s)


@dataclass(slots=True)
class Target:
    """Where the coordinator wants requests to go, and how many bytes of KV it still wants moved."""

    to: Peer
    num_bytes: int
    until_s: float
    decoding_only: bool

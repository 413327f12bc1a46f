"""KV checkpoints, the source's side: KV kept in another worker's host memory, so that a worker's death costs a copy.

Nobody's paper has this; Splitwise (section 4.5) names it as what should be done. A worker has a guardian, which reads
the full blocks of its requests a few at a time, beside everything else, as in a migration (``core.migration.source``).
The source confirms each read once it is done, if the request still had its blocks where they were: what is confirmed
stays right, whatever becomes of the request, for KV is only ever appended to. When the worker dies, the gateway has
each request carried on by its guardian: there it is as if it had been swapped out, up to the last block that was
confirmed, and what came after is computed. ``core.checkpoints.store`` is the guardian's side.
"""

import math
from dataclasses import dataclass

from actorserve.core.effects import Effect, Meet, Send
from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.kv.tickets import make_ticket
from actorserve.core.messages import (
    Checkpoint,
    CheckpointConfirmed,
    Checkpointed,
    Copied,
    Declined,
    DeclineReason,
    KVAccess,
    Peer,
    Withdrawn,
)
from actorserve.core.request import Request

_FIRST_NUMBER = 2**48  # apart from migrations', so that no ticket and no name is given twice
_MAX_READS = 2  # under way from one source
_MAX_READ_BLOCKS = 64  # at once: a death in the middle of a long prompt's loses only the last of them
_ASK_AGAIN_S = 10.0  # for a read
_LOOK_EVERY_S = 0.1  # for requests that are due
_REST_S = 2.0  # after the guardian has declined


@dataclass(slots=True, eq=False)
class _Guarded:
    """A request of which the guardian has ``num_confirmed`` blocks. While it reads what ``asked`` names, which are
    blocks out of ``blocks``, the very list that the request had when that began, it is asked again at ``deadline_s``.
    """

    number: int
    request: Request
    stage: int = -1
    confirmed_stage: int = -1
    num_confirmed: int = 0
    asked: Checkpoint | None = None
    blocks: list[int] | None = None
    deadline_s: float = math.inf


class CheckpointSource:
    """Has a guardian read the KV of an instance's requests, each time that ``every_tokens`` of one are new."""

    def __init__(self, memory: KVMemory, requests: dict[str, Request], ticket_key: str, every_tokens: int) -> None:
        """``requests``: those of the instance. ``every_tokens`` 0: never."""
        self._memory = memory
        self._requests = requests
        self._key = bytes.fromhex(ticket_key)
        self._every_blocks = max(1, every_tokens // memory.tokens_per_block) if every_tokens else 0
        self._guardian: Peer | None = None
        self._peers: set[Peer] = set()
        self._guarded: dict[str, _Guarded] = {}  # by request id
        self._next_number = _FIRST_NUMBER
        self._next_look_s = -math.inf
        self.checkpointed_bytes = 0

    def __len__(self) -> int:
        return len(self._guarded)

    @property
    def holder(self) -> Peer | None:
        return self._guardian

    def next_deadline(self) -> float | None:
        return min((each.deadline_s for each in self._guarded.values() if each.asked is not None), default=None)

    # --- what others say ---------------------------------------------------------------------------------------------

    def on_order(self, holder: Peer, effects: list[Effect]) -> None:
        """From now on this worker is the guardian."""
        if not self._every_blocks:
            return
        if holder != self._guardian:
            self._let_go(effects)
            self._guardian = holder
        if holder not in self._peers:
            effects.append(Meet(holder))

    def on_peer_up(self, peer: Peer, access: KVAccess | None) -> None:
        self._peers.add(peer)

    def on_peer_down(self, peer: Peer, now: float) -> None:
        self._peers.discard(peer)
        if peer == self._guardian:
            self._guardian = None
            self._guarded.clear()

    def on_copied(self, message: Copied, sender: Peer, effects: list[Effect]) -> bool:
        """A read is done; it counts if the blocks were the request's all the time. Or the guardian asks, with its last
        word, whether what it keeps is still of use. Returns whether it is.
        """
        each = self._find(message.number, sender)
        if each is None:
            return False
        request, asked = each.request, each.asked
        if asked is not None and message.stage == each.stage:
            if request.blocks is each.blocks and request.copy_id is None:
                num_blocks = len(asked.ticket.blocks)
                each.num_confirmed, each.confirmed_stage = each.num_confirmed + num_blocks, each.stage
                self.checkpointed_bytes += self._memory.bytes_of_blocks(num_blocks)
                # Each time, for it may be lost.
                checkpointed = Checkpointed(request.request_id, request.epoch, sender, each.number)
                effects.append(Send(request.gateway, checkpointed))
            each.asked = each.blocks = None
        if each.num_confirmed:
            effects.append(Send(sender, CheckpointConfirmed(each.number, each.confirmed_stage)))
        return True

    def on_declined(self, message: Declined, sender: Peer, now: float) -> bool:
        """It has no room, could not read, or has lost what it had. Returns whether that was meant."""
        each = self._find(message.number, sender)
        if each is None:
            return False
        each.asked = each.blocks = None
        is_kept = message.reason in (DeclineReason.NO_BLOCKS, DeclineReason.UNREACHABLE)
        if not is_kept or not each.num_confirmed:
            del self._guarded[each.request.request_id]
        self._next_look_s = now + _REST_S
        return True

    def on_gone(self, request: Request, effects: list[Effect]) -> None:
        """The instance has forgotten a request."""
        each = self._guarded.get(request.request_id)
        if each is not None and each.request is request:
            del self._guarded[request.request_id]
            if self._guardian is not None:
                effects.append(Send(self._guardian, Withdrawn(each.number)))

    # --- reads -------------------------------------------------------------------------------------------------------

    def settle(self, now: float, effects: list[Effect]) -> None:
        """Ask again for reads of which nothing was heard, and have others begin: of those first that have most to lose.

        A read that preemption has voided meanwhile goes on like another: it is harmless, and will not be confirmed.
        """
        holder = self._guardian
        if holder is None or holder not in self._peers:
            return
        num_reads = 0
        for each in self._guarded.values():
            if each.asked is not None:
                num_reads += 1
                if now >= each.deadline_s:
                    each.deadline_s = now + _ASK_AGAIN_S
                    effects.append(Send(holder, each.asked))
        if now < self._next_look_s or num_reads >= _MAX_READS:
            return
        self._next_look_s = now + _LOOK_EVERY_S
        due = [(self._num_new(request), request) for request in self._requests.values() if request.is_resident]
        due = [(num_new, request) for num_new, request in due if num_new >= self._every_blocks]
        due.sort(key=lambda each: -each[0])
        for num_new, request in due[: _MAX_READS - num_reads]:
            self._offer(request, min(num_new, _MAX_READ_BLOCKS), holder, now, effects)

    def _num_new(self, request: Request) -> int:
        """Full blocks that the guardian has not, nor reads."""
        if request.num_output == 0:
            return 0
        each = self._guarded.get(request.request_id)
        num_full = request.num_computed // self._memory.tokens_per_block
        if each is None:
            return num_full
        return 0 if each.asked is not None else num_full - each.num_confirmed

    def _offer(self, request: Request, num_blocks: int, holder: Peer, now: float, effects: list[Effect]) -> None:
        each = self._guarded.get(request.request_id)
        if each is None:
            each = self._guarded[request.request_id] = _Guarded(self._next_number, request)
            self._next_number += 1
        each.stage += 1
        each.blocks = request.blocks
        each.deadline_s = now + _ASK_AGAIN_S
        first, end, size = each.num_confirmed, each.num_confirmed + num_blocks, self._memory.tokens_per_block
        ticket = make_ticket(self._key, each.number, each.stage, tuple(request.blocks[first:end]), on_host=False)
        token_ids = tuple(request.token_ids[first * size : end * size])
        each.asked = Checkpoint(each.number, request.request_id, request.gateway, first, token_ids, ticket)
        effects.append(Send(holder, each.asked))

    def _let_go(self, effects: list[Effect]) -> None:
        if self._guardian is not None:
            effects.extend(Send(self._guardian, Withdrawn(each.number)) for each in self._guarded.values())
        self._guarded.clear()

    def _find(self, number: int, sender: Peer) -> _Guarded | None:
        if sender != self._guardian:
            return None
        return next((each for each in self._guarded.values() if each.number == number), None)

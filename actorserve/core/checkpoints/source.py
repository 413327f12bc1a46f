"""KV checkpoints, the source's side: another worker's host memory keeps KV, so that after a worker's death a copy
replaces recomputation.

No paper has this; Splitwise (section 4.5) proposes it. The coordinator names a worker as the *holder* of this worker's
checkpoints. The holder reads the full blocks of requests, a few at a time and in parallel to iterations, as in a
migration (``core.migration.source``). The source confirms each read afterwards if the request kept its blocks during
it. Confirmed blocks stay right whatever happens to the request, because KV is only ever appended to.

Layers with a window are read only as far as the token after the read's last row sees them. A long prompt has given up
these blocks for its first reads. So its last read has the whole window, and makes the checkpoint useful.

When the worker dies, the gateway starts each request at the holder. There the request is like one that was swapped out,
up to the last confirmed block; later tokens are computed again. ``core.checkpoints.store`` is the holder's side.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from actorserve.core.effects import Effects, Meet
from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.kv.tickets import make_ticket
from actorserve.core.messages import (
    Checkpoint,
    CheckpointConfirmed,
    Checkpointed,
    CheckpointTo,
    Copied,
    Declined,
    DeclineReason,
    KVAccess,
    Message,
    Peer,
    TransferId,
    TransferKind,
    Withdrawn,
)
from actorserve.core.participant import Handler, Participant
from actorserve.core.request import Request

_MAX_READS = 2  # in flight from one source
_MAX_READ_ROWS = 64  # in one read beside a window, so that a death during a long prompt's reads loses the last one only
_ASK_AGAIN_S = 10.0  # for a read that was not answered
_LOOK_EVERY_S = 0.1  # for requests with enough new blocks
_REST_S = 2.0  # after the holder has declined


@dataclass(slots=True, eq=False)
class _Checkpoints:
    """The checkpoints of one request, of which ``num_confirmed`` rows are confirmed.

    While the holder reads the blocks that ``asked`` names, ``blocks`` is the same list object that the request had when
    the read began (preemption replaces it). The source asks again at ``deadline_s``.
    """

    id: TransferId
    request: Request
    stage: int = -1
    confirmed_stage: int = -1
    num_confirmed: int = 0
    asked: Checkpoint | None = None
    blocks: list[int] | None = None
    deadline_s: float = math.inf


class CheckpointSource(Participant):
    """Asks the holder to read a request's KV each time the request has enough new tokens."""

    kind = TransferKind.CHECKPOINT

    def __init__(
        self, ticket_key: str, every_tokens: int, memory: KVMemory, requests: Mapping[str, Request], effects: Effects
    ) -> None:
        """``requests`` are the instance's. ``every_tokens``: how many new tokens make a checkpoint; 0 makes none."""
        self.holder: Peer | None = None
        self.checkpointed_bytes = 0
        self._memory = memory
        self._requests = requests
        self._effects = effects
        self._key = bytes.fromhex(ticket_key)
        self._every_rows = max(1, every_tokens // memory.tokens_per_block) if every_tokens else 0
        self._peers: set[Peer] = set()
        self._checkpoints: dict[str, _Checkpoints] = {}  # by request id
        self._num_transfers = 0
        self._next_look_s = -math.inf

    def __len__(self) -> int:
        return len(self._checkpoints)

    @property
    def wants_step_end(self) -> bool:
        """New blocks may be due after any step."""
        return self.holder is not None

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        return {CheckpointTo: self._on_checkpoint_to}

    @property
    def transfer_handlers(self) -> Mapping[type[Message], Handler]:
        return {Copied: self._on_copied, Declined: self._on_declined}

    def next_deadline(self) -> float | None:
        in_flight = (
            checkpoints.deadline_s for checkpoints in self._checkpoints.values() if checkpoints.asked is not None
        )
        return min(in_flight, default=None)

    def validate(self) -> None:
        for request_id, checkpoints in self._checkpoints.items():
            assert self._requests.get(request_id) is checkpoints.request, f"checkpoints of {request_id}, which is gone"
            assert checkpoints.confirmed_stage <= checkpoints.stage, (
                f"{request_id} has a confirmed stage that was never read"
            )
        assert self.holder is not None or not self._checkpoints, "checkpoints without a holder"

    # --- messages and events -----------------------------------------------------------------------------------------

    def _on_checkpoint_to(self, message: CheckpointTo, sender: Peer, now: float) -> None:
        """From now on this worker holds the checkpoints."""
        if not self._every_rows:
            return
        if message.holder != self.holder:
            self._withdraw_all()
            self.holder = message.holder
        if message.holder not in self._peers:
            self._effects.append(Meet(message.holder))

    def on_peer_up(self, peer: Peer, access: KVAccess | None) -> None:
        self._peers.add(peer)

    def on_peer_down(self, peer: Peer, now: float) -> None:
        self._peers.discard(peer)
        if peer == self.holder:
            self.holder = None
            self._checkpoints.clear()

    def _on_copied(self, message: Copied, sender: Peer, now: float) -> bool:
        """A read is done; it counts if the request kept its blocks during it. Or the holder repeats its last answer to
        ask whether its checkpoints are still of use. Returns whether they are.
        """
        checkpoints = self._find(message.transfer, sender)
        if checkpoints is None:
            self._effects.send(sender, Withdrawn(message.transfer))  # an earlier Withdrawn may have been lost
            return False
        request, asked = checkpoints.request, checkpoints.asked
        if asked is not None and message.stage == checkpoints.stage:
            if self._was_unchanged(checkpoints, asked):
                checkpoints.num_confirmed, checkpoints.confirmed_stage = self._end_of(asked), checkpoints.stage
                self.checkpointed_bytes += self._memory.bytes_of_blocks(len(asked.ticket.blocks))
                # Sent after each read, because an earlier one may have been lost.
                checkpointed = Checkpointed(request.request_id, request.epoch, sender, checkpoints.id)
                self._effects.send(request.gateway, checkpointed)
            checkpoints.asked = checkpoints.blocks = None
        if checkpoints.num_confirmed:
            self._effects.send(sender, CheckpointConfirmed(checkpoints.id, checkpoints.confirmed_stage))
        return True

    def _on_declined(self, message: Declined, sender: Peer, now: float) -> bool:
        """The holder has no room, could not read, or has lost what it had."""
        checkpoints = self._find(message.transfer, sender)
        if checkpoints is None:
            return False
        checkpoints.asked = checkpoints.blocks = None
        is_kept = message.reason in (DeclineReason.NO_BLOCKS, DeclineReason.UNREACHABLE)
        if not is_kept or not checkpoints.num_confirmed:
            del self._checkpoints[checkpoints.request.request_id]
        self._next_look_s = now + _REST_S
        return True

    def on_gone(self, request: Request) -> None:
        checkpoints = self._checkpoints.get(request.request_id)
        if checkpoints is not None and checkpoints.request is request:
            del self._checkpoints[request.request_id]
            if self.holder is not None:
                self._effects.send(self.holder, Withdrawn(checkpoints.id))

    # --- reads -------------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        """Repeat reads that were not answered, and begin new ones, first for requests with the most new blocks.

        A read that preemption has voided goes on like any other: it does no harm, and will not be confirmed.
        """
        holder = self.holder
        if holder is None or holder not in self._peers:
            return
        num_reads = 0
        for checkpoints in self._checkpoints.values():
            if checkpoints.asked is not None:
                num_reads += 1
                if now >= checkpoints.deadline_s:
                    checkpoints.deadline_s = now + _ASK_AGAIN_S
                    self._effects.send(holder, checkpoints.asked)
        if now < self._next_look_s or num_reads >= _MAX_READS:
            return
        self._next_look_s = now + _LOOK_EVERY_S
        due = [(self._num_new(request), request) for request in self._requests.values() if request.is_resident]
        due = [(num_new, request) for num_new, request in due if num_new >= self._every_rows]
        due.sort(key=lambda pair: -pair[0])
        for num_new, request in due[: _MAX_READS - num_reads]:
            self._offer(request, num_new, holder, now)

    def _num_new(self, request: Request) -> int:
        """How many full rows the holder neither has nor reads now."""
        if request.num_output == 0:
            return 0
        checkpoints = self._checkpoints.get(request.request_id)
        num_full = request.num_computed // self._memory.tokens_per_block
        if checkpoints is None:
            return num_full
        return 0 if checkpoints.asked is not None else num_full - checkpoints.num_confirmed

    def _end_of_read(self, request: Request, first: int, end: int) -> int:
        """Up to which row the next read goes, of the rows from ``first`` to ``end`` that the holder lacks."""
        rows, read_end = self._memory.rows, first + _MAX_READ_ROWS
        if read_end >= end:
            return end
        if request.first_row <= rows.first_seen(read_end):
            return read_end
        # The request has given up blocks of the window before this end. Rows before the window of the newest row can be
        # read without it, and the last read takes all other rows, because a part of the window is of no use.
        return read_end if rows.num_full and read_end <= rows.first_seen(end) else end

    def _offer(self, request: Request, num_new: int, holder: Peer, now: float) -> None:
        checkpoints = self._checkpoints.get(request.request_id)
        if checkpoints is None:
            self._num_transfers += 1
            transfer = TransferId(self.kind, self._num_transfers)
            checkpoints = self._checkpoints[request.request_id] = _Checkpoints(transfer, request)
        checkpoints.stage += 1
        checkpoints.blocks = request.blocks
        checkpoints.deadline_s = now + _ASK_AGAIN_S
        first, rows, size = checkpoints.num_confirmed, self._memory.rows, self._memory.tokens_per_block
        end = self._end_of_read(request, first, first + num_new)
        first_row = rows.first_seen(end)
        if request.first_row > first_row:
            first_row = end  # some of the window's blocks were given up, and the others are of no use without them
        blocks = tuple(rows.span(request.blocks, first, end, first_row))
        ticket = make_ticket(self._key, checkpoints.id, checkpoints.stage, blocks, on_host=False)
        token_ids = tuple(request.token_ids[first * size : end * size])
        checkpoints.asked = Checkpoint(request.request_id, request.gateway, first, token_ids, ticket)
        self._effects.send(holder, checkpoints.asked)

    def _was_unchanged(self, checkpoints: _Checkpoints, asked: Checkpoint) -> bool:
        """Whether the request kept the blocks that were read."""
        request, rows = checkpoints.request, self._memory.rows
        if request.blocks is not checkpoints.blocks:
            return False
        end = self._end_of(asked)
        had_window = len(asked.ticket.blocks) > rows.num_full * (end - asked.num_confirmed)
        return not had_window or request.first_row <= max(asked.num_confirmed, rows.first_seen(end))

    def _end_of(self, asked: Checkpoint) -> int:
        """The rows of the request up to the end of this read."""
        return asked.num_confirmed + len(asked.token_ids) // self._memory.tokens_per_block

    def _withdraw_all(self) -> None:
        if self.holder is not None:
            for checkpoints in self._checkpoints.values():
                self._effects.send(self.holder, Withdrawn(checkpoints.id))
        self._checkpoints.clear()

    def _find(self, transfer: TransferId, sender: Peer) -> _Checkpoints | None:
        if sender != self.holder:
            return None
        return next((checkpoints for checkpoints in self._checkpoints.values() if checkpoints.id == transfer), None)

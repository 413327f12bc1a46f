"""KV checkpoints, the holder's side: host memory keeps KV of other workers' requests (``core.checkpoints.source``)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from actorserve.core.effects import Effects, Fetch
from actorserve.core.kv.kv_holding import KVHolding
from actorserve.core.kv.kv_pools import KVPools
from actorserve.core.kv.layer_groups import NO_BLOCK, Rows
from actorserve.core.messages import (
    Checkpoint,
    CheckpointConfirmed,
    Copied,
    Declined,
    DeclineReason,
    KVAccess,
    Message,
    Peer,
    Transfer,
    TransferKind,
    Withdrawn,
)
from actorserve.core.participant import Handler, Participant
from actorserve.core.request import Request

_HOST_SHARE = 2  # checkpoints leave at least half of the host's pool to swapping


@dataclass(slots=True, eq=False)
class _Stored:
    """The checkpoints of another worker's request. The first ``num_confirmed`` rows in ``kv`` are confirmed.

    ``stage`` is the last that was read or is being read. ``kv`` has the tokens of all its rows.
    """

    transfer: Transfer
    gateway: Peer
    stage: int
    kv: KVHolding = field(default_factory=KVHolding)
    num_confirmed: int = 0
    deadline_s: float = math.inf
    was_asked_for: bool = False


class CheckpointStore(Participant):
    """Keeps checkpoints until their request leaves, its gateway dies, or swapping needs the blocks.

    It asks a live source every ``timeout_s`` whether a checkpoint is still of use, because the source's Withdrawn may
    have been lost. It keeps a dead source's checkpoints for ``timeout_s``; by then the gateways have noticed.
    """

    kind = TransferKind.CHECKPOINT

    def __init__(self, pools: KVPools, rows: Rows, timeout_s: float, effects: Effects) -> None:
        self._pools = pools
        self._rows = rows
        self._timeout_s = timeout_s
        self._effects = effects
        self._access: dict[Peer, KVAccess] = {}
        self._stored: dict[Transfer, _Stored] = {}  # the oldest first
        self._is_draining = False

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def holdings(self) -> list[KVHolding]:
        """What owns the checkpoints' host blocks."""
        return [stored.kv for stored in self._stored.values()]

    @property
    def num_blocks(self) -> int:
        """Host blocks in use for checkpoints, including released blocks that a copy still writes."""
        return sum(
            len(self._rows.held(stored.kv.host_blocks)) for stored in self._stored.values()
        ) + self._pools.num_released_blocks(self._pools.host)

    @property
    def transfer_handlers(self) -> Mapping[type[Message], Handler]:
        return {
            Checkpoint: self._on_checkpoint,
            CheckpointConfirmed: self._on_confirmed,
            Withdrawn: self._on_withdrawn,
        }

    def next_deadline(self) -> float | None:
        return min((stored.deadline_s for stored in self._stored.values()), default=None)

    def validate(self) -> None:
        for transfer, stored in self._stored.items():
            num_rows = self._num_rows(stored)
            assert not stored.kv.blocks, f"{transfer} has blocks on the device"
            assert stored.num_confirmed <= num_rows, f"{transfer} has {num_rows} rows, {stored.num_confirmed} confirmed"
            assert len(stored.kv.token_ids) == num_rows * self._pools.tokens_per_block, f"{transfer} has other tokens"

    # --- messages and events -----------------------------------------------------------------------------------------

    def on_peer_up(self, peer: Peer, access: KVAccess | None) -> None:
        if access is not None:
            self._access[peer] = access

    def on_peer_down(self, peer: Peer, now: float) -> None:
        self._access.pop(peer, None)
        for stored in list(self._stored.values()):
            if stored.gateway == peer:
                self._drop(stored)
            elif stored.transfer.source == peer:
                stored.deadline_s, stored.was_asked_for = now + self._timeout_s, True

    def on_drain(self) -> None:
        self._is_draining = True
        for stored in list(self._stored.values()):
            self._drop(stored)

    def on_tick(self, now: float) -> None:
        for stored in list(self._stored.values()):
            if now < stored.deadline_s:
                continue
            if stored.was_asked_for:
                self._drop(stored)
            else:
                stored.deadline_s, stored.was_asked_for = now + self._timeout_s, True
                if stored.kv.copy_id is None:
                    self._send_copied(stored)

    def _on_checkpoint(self, message: Checkpoint, source: Peer, now: float) -> None:
        """Read the blocks that follow the confirmed ones."""
        transfer, ticket, pools = Transfer(source, message.transfer), message.ticket, self._pools
        if self._is_draining:
            self._decline(transfer, DeclineReason.DRAINING)
            return
        stored = self._stored.get(transfer)
        if stored is not None and (stored.kv.copy_id is not None or ticket.stage <= stored.stage):
            if stored.kv.copy_id is None and ticket.stage == stored.stage:
                self._send_copied(stored)  # the first answer may have been lost
            return
        if stored is None and not message.num_confirmed:
            stored = self._stored[transfer] = _Stored(transfer, message.gateway, ticket.stage - 1)
        if (
            stored is None
            or not stored.num_confirmed <= message.num_confirmed <= self._num_rows(stored)
            or (first_row := self._first_row(message)) is None
        ):
            self._decline(transfer, DeclineReason.UNKNOWN)
            return
        self._confirm(stored, message.num_confirmed)  # an earlier CheckpointConfirmed may have been lost
        self._void_unconfirmed(stored)
        stored.deadline_s, stored.was_asked_for = now + self._timeout_s, False
        if source not in self._access:
            self._decline(transfer, DeclineReason.UNREACHABLE)
            return
        blocks = self._allocate(stored, message, first_row)
        if blocks is None:
            self._decline(transfer, DeclineReason.NO_BLOCKS)
            return
        stored.stage = ticket.stage
        stored.kv.token_ids.extend(message.token_ids)
        copy_id = pools.begin_fetch(transfer, stored.kv, blocks, into_host=True)
        access = self._access[source]
        self._effects.append(Fetch(copy_id, source, access, ticket, 0, blocks, is_urgent=False, into_host=True))

    def on_fetched(self, transfer: Transfer, now: float, *, failed: bool) -> None:
        """The copy in flight for this transfer succeeded or failed."""
        stored = self._stored[transfer]
        if failed:
            stored.stage -= 1
            self._void_unconfirmed(stored)
            self._decline(transfer, DeclineReason.UNREACHABLE)
        else:
            self._send_copied(stored)

    def _on_confirmed(self, message: CheckpointConfirmed, source: Peer, now: float) -> None:
        stored = self._stored.get(Transfer(source, message.transfer))
        if stored is None:
            return
        stored.deadline_s, stored.was_asked_for = now + self._timeout_s, False
        if stored.stage == message.stage and stored.kv.copy_id is None:
            self._confirm(stored, self._num_rows(stored))

    def _on_withdrawn(self, message: Withdrawn, source: Peer, now: float) -> None:
        stored = self._stored.get(Transfer(source, message.transfer))
        if stored is not None:
            self._drop(stored)

    # --- memory ------------------------------------------------------------------------------------------------------

    def make_room(self, num_blocks: int) -> None:
        """Drop checkpoints, the oldest first, until ``num_blocks`` host blocks are free for swapping."""
        for stored in list(self._stored.values()):
            if self._pools.host.num_free_blocks >= num_blocks:
                return
            if stored.kv.copy_id is None:
                self._drop(stored)

    def adopt(self, transfer: Transfer, request: Request) -> bool:
        """Give ``request``, which is this instance's from now on, its confirmed blocks, as if it had been swapped out.
        False if none is usable.
        """
        stored = self._stored.pop(transfer, None)
        if stored is None:
            return False
        size, rows, kv = self._pools.tokens_per_block, self._rows, stored.kv
        # The gateway may not have the newest tokens. The last token must be fed to get the next one.
        num_rows = min(stored.num_confirmed, (len(request.token_ids) - 1) // size)
        num_tokens, first_row = num_rows * size, rows.first_seen(num_rows)
        if (
            kv.token_ids[:num_tokens] != request.token_ids[:num_tokens]
            or not request.may_reuse_kv
            or NO_BLOCK in kv.host_blocks[first_row * rows.num_groups : num_rows * rows.num_groups]
        ):
            num_rows = 0
        if num_rows:
            self._pools.host.free(rows.give_up(kv.host_blocks, 0, first_row))
        request.host_blocks = kv.host_blocks[: num_rows * rows.num_groups]
        del kv.host_blocks[: num_rows * rows.num_groups]
        self._effects += self._pools.release(kv)
        if not num_rows:
            return False
        request.num_computed, request.first_row = num_tokens, first_row
        request.num_cached_tokens = 0  # it was first admitted elsewhere
        return True

    def _num_rows(self, stored: _Stored) -> int:
        return len(stored.kv.host_blocks) // self._rows.num_groups

    def _first_row(self, message: Checkpoint) -> int | None:
        """The first row of which the ticket has the windowed groups' blocks: the end, if it has none of them. None if
        tokens and blocks do not fit together.
        """
        num_rows, num_over = divmod(len(message.token_ids), self._pools.tokens_per_block)
        begin, end = message.num_confirmed, message.num_confirmed + num_rows
        for first_row in (self._rows.first_seen(end), end):
            if len(message.ticket.blocks) == self._rows.count(begin, end, first_row, end) and num_rows and not num_over:
                return first_row
        return None

    def _confirm(self, stored: _Stored, num_rows: int) -> None:
        """Confirm the first ``num_rows`` rows, and free what no token to come sees.

        One row more is kept than that, because the gateway may not have the newest tokens.
        """
        stored.num_confirmed = num_rows
        first_row = self._rows.first_seen(num_rows - 1)
        if first_row > stored.kv.first_row:
            self._pools.host.free(self._rows.give_up(stored.kv.host_blocks, stored.kv.first_row, first_row))
            stored.kv.first_row = first_row

    def _allocate(self, stored: _Stored, message: Checkpoint, first_row: int) -> tuple[int, ...] | None:
        """More host blocks for these checkpoints, unless swapping's share of the pool would suffer."""
        host, num_blocks = self._pools.host, len(message.ticket.blocks)
        num_spare = -(-host.num_blocks // _HOST_SHARE)
        blocks = host.allocate(num_blocks) if num_blocks + num_spare <= host.num_free_blocks else None
        if blocks is None:
            return None
        begin = message.num_confirmed
        end = begin + len(message.token_ids) // self._pools.tokens_per_block
        stored.kv.host_blocks += self._rows.place(blocks, begin, end, first_row, end)
        return tuple(blocks)

    def _void_unconfirmed(self, stored: _Stored) -> None:
        """Free the unconfirmed blocks. No copy may be writing them."""
        end = stored.num_confirmed * self._rows.num_groups
        self._pools.host.free(self._rows.held(stored.kv.host_blocks[end:]))
        del stored.kv.host_blocks[end:]
        del stored.kv.token_ids[stored.num_confirmed * self._pools.tokens_per_block :]

    def _drop(self, stored: _Stored) -> None:
        del self._stored[stored.transfer]
        self._effects += self._pools.release(stored.kv)

    def _send_copied(self, stored: _Stored) -> None:
        self._effects.send(stored.transfer.source, Copied(stored.transfer.id, stored.stage))

    def _decline(self, transfer: Transfer, reason: DeclineReason) -> None:
        """Refuse a read. Confirmed blocks stay if only this read failed."""
        stored = self._stored.get(transfer)
        is_kept = reason in (DeclineReason.NO_BLOCKS, DeclineReason.UNREACHABLE)
        if stored is not None and not (is_kept and stored.num_confirmed):
            self._drop(stored)
        self._effects.send(transfer.source, Declined(transfer.id, reason))

"""Live migration, the destination's side: KV of requests that other instances offer (``core.migration.source``).

KV that is copied here belongs to no request until the gateway hands the request over (``Start.transfer``). Only then
may other requests find it in the prefix cache. Until then the destination gives it up at once if the source withdraws
it or dies, the gateway dies, a copy fails, or the next stage does not come in time. Only complete
KV survives the source's death, until its deadline, because the request may just have been handed over.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from actorserve.core.effects import Effects, Fetch
from actorserve.core.kv.kv_holding import KVHolding
from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.messages import (
    Copied,
    Declined,
    DeclineReason,
    KVAccess,
    KVTicket,
    Message,
    Offer,
    Peer,
    RequestSpec,
    Stage,
    Transfer,
    TransferKind,
    Withdrawn,
)
from actorserve.core.migration.config import MigrationConfig
from actorserve.core.participant import Handler, Participant, Running
from actorserve.core.request import Request

_MAX_FROM_ONE = 256  # requests in flight from one source, which may hand over all that an iteration prefills
_PATIENCE = 4.0  # the source may compute for this many times the expected time
_MAX_COMPUTING_S = 600.0  # of the times that a source expects
_MIN_BYTES_PER_S = 2**23  # a slower copy is given up if no configured rate bounds it


@dataclass(slots=True, eq=False)
class _Incoming:
    """A request in flight to this instance.

    The first ``num_offered`` rows of ``kv`` are copied or being copied, except ``num_found`` at the beginning, which
    the prefix cache had. The source may compute for ``computing_s`` before the KV of this stage, or the next stage.
    ``lacks_token``: the iteration that computed the last KV made a token after those of ``kv``.
    """

    transfer: Transfer
    gateway: Peer
    kv: KVHolding
    num_found: int
    deadline_s: float = math.inf
    stage: int = 0
    num_offered: int = 0
    is_last: bool = False
    lacks_token: bool = False
    computing_s: float = 0.0

    @property
    def is_copying(self) -> bool:
        return self.kv.copy_id is not None

    @property
    def is_whole(self) -> bool:
        """Whether all of the request's KV lies here."""
        return self.is_last and not self.is_copying


class MigrationDestination(Participant):
    """Accepts requests while there is room, and copies their KV, stage by stage."""

    kind = TransferKind.MIGRATION

    def __init__(
        self,
        config: MigrationConfig,
        max_tokens: int,
        reserves_output: bool,
        memory: KVMemory,
        steps: Running,
        effects: Effects,
    ) -> None:
        """``max_tokens``: of the largest request that is served here. ``reserves_output``: whether the policy does."""
        self._max_tokens = max_tokens
        self._reserves_output = reserves_output
        self._memory = memory
        self._steps = steps
        self._effects = effects
        self._timeout_s = 2 * config.timeout_s  # from one stage to the next
        self._min_bytes_per_s = config.bytes_per_s / 4 if config.bytes_per_s else _MIN_BYTES_PER_S
        self._access: dict[Peer, KVAccess] = {}  # of the workers that are up
        self._incoming: dict[Transfer, _Incoming] = {}
        self._is_draining = False

    def __len__(self) -> int:
        return len(self._incoming)

    @property
    def holdings(self) -> list[KVHolding]:
        """What owns the blocks of the requests in flight."""
        return [incoming.kv for incoming in self._incoming.values()]

    @property
    def num_blocks(self) -> int:
        """Blocks reserved for the requests in flight, and those that a copy still writes for one that was given up."""
        num_held = sum([self._memory.num_held(incoming.kv) for incoming in self._incoming.values()])
        return num_held + self._memory.pools.num_released_blocks(self._memory.device)

    @property
    def transfer_handlers(self) -> Mapping[type[Message], Handler]:
        return {Offer: self._on_offer, Stage: self._on_stage, Withdrawn: self._on_withdrawn}

    def next_deadline(self) -> float | None:
        deadlines = (incoming.deadline_s for incoming in self._incoming.values())
        return min((deadline_s for deadline_s in deadlines if deadline_s < math.inf), default=None)

    def validate(self) -> None:
        for transfer, incoming in self._incoming.items():
            assert not incoming.kv.host_blocks, f"{transfer} has blocks on the host"
            num_rows = len(incoming.kv.blocks) // self._memory.rows.num_groups
            assert incoming.num_offered <= num_rows, f"{transfer} has too few blocks"
            assert incoming.num_found <= num_rows, f"{transfer} found more blocks than it has"

    # --- messages and events -----------------------------------------------------------------------------------------

    def on_peer_up(self, peer: Peer, access: KVAccess | None) -> None:
        if access is not None:
            self._access[peer] = access

    def on_peer_down(self, peer: Peer, now: float) -> None:
        self._access.pop(peer, None)
        for incoming in list(self._incoming.values()):
            if incoming.gateway == peer or (incoming.transfer.source == peer and not incoming.is_whole):
                self._drop(incoming)

    def on_drain(self) -> None:
        self._is_draining = True
        for transfer in list(self._incoming):
            self._decline(transfer, DeclineReason.DRAINING)

    def on_tick(self, now: float) -> None:
        for transfer, incoming in list(self._incoming.items()):
            if now >= incoming.deadline_s:
                self._decline(transfer, DeclineReason.UNKNOWN)

    def _on_offer(self, offer: Offer, source: Peer, now: float) -> None:
        """Accept a request if enough blocks are free."""
        transfer = Transfer(source, offer.transfer)
        if self._is_draining:
            self._decline(transfer, DeclineReason.DRAINING)
            return
        known = self._incoming.get(transfer)
        if known is not None:
            if known.stage == 0 and not known.is_copying:
                self._send_copied(known)  # the first answer may have been lost
            return
        spec, num_found = offer.request, None
        kv = KVHolding((*spec.prompt_token_ids, *spec.output_token_ids), spec.cache_salt)
        num_tokens = len(kv.token_ids)
        reason = DeclineReason.NO_BLOCKS
        kv.num_computed, kv.first_row = offer.num_computed, self._memory.first_seen(offer.num_computed)
        has_kv = offer.num_computed > 0 or not offer.is_last
        if not has_kv or not self._is_sound(0, offer.num_computed, num_tokens, offer.ticket):
            reason = DeclineReason.UNKNOWN
        elif source not in self._access:
            reason = DeclineReason.UNREACHABLE
        elif num_tokens < self._max_tokens and self._num_from(source) < _MAX_FROM_ONE:
            num_found = self._reserve(kv, spec)
        if num_found is None:
            self._decline(transfer, reason)
            return
        incoming = self._incoming[transfer] = _Incoming(transfer, offer.gateway, kv, num_found)
        self._fetch(incoming, offer, now)

    def _on_stage(self, stage: Stage, source: Peer, now: float) -> None:
        transfer = Transfer(source, stage.transfer)
        incoming, number = self._incoming.get(transfer), stage.ticket.stage
        if incoming is not None and incoming.stage == number:
            if not incoming.is_copying:
                self._send_copied(incoming)
            return
        if incoming is None or number != incoming.stage + 1 or incoming.is_copying or incoming.is_last:
            self._decline(transfer, DeclineReason.UNKNOWN)
            return
        incoming.kv.token_ids.extend(stage.token_ids)
        num_tokens, incoming.kv.num_computed = len(incoming.kv.token_ids), stage.num_computed
        if not self._is_sound(incoming.num_offered, stage.num_computed, num_tokens, stage.ticket):
            self._decline(transfer, DeclineReason.UNKNOWN)
        elif num_tokens >= self._max_tokens or not self._memory.extend(incoming.kv):
            self._decline(transfer, DeclineReason.NO_BLOCKS)
        else:
            incoming.stage = number
            self._fetch(incoming, stage, now)

    def _on_withdrawn(self, message: Withdrawn, source: Peer, now: float) -> None:
        incoming = self._incoming.get(Transfer(source, message.transfer))
        if incoming is not None:
            self._drop(incoming)

    def on_fetched(self, transfer: Transfer, now: float, *, failed: bool) -> None:
        """The copy in flight for this transfer succeeded or failed."""
        if failed:
            self._decline(transfer, DeclineReason.UNREACHABLE)
        else:
            self._on_stage_copied(self._incoming[transfer], now)

    def adopt(self, transfer: Transfer, request: Request) -> bool:
        """Give ``request``, which is this instance's from now on, the KV that was copied. False if some is missing, or
        the request may not use it.
        """
        incoming = self._incoming.get(transfer)
        if incoming is None:
            return False
        kv = incoming.kv
        token_ids = request.token_ids[:-1] if incoming.lacks_token else request.token_ids
        if not incoming.is_whole or kv.token_ids != token_ids or not request.may_reuse_kv:
            self._drop(incoming)
            return False
        del self._incoming[transfer]
        request.blocks, kv.blocks = kv.blocks, []
        request.first_row, request.end_row = kv.first_row, kv.end_row
        request.block_names = kv.block_names
        request.num_computed = kv.num_computed
        request.num_cached_tokens = 0  # it was first admitted elsewhere
        self._memory.share_computed(request, request.num_computed)
        return True

    # --- room --------------------------------------------------------------------------------------------------------

    def _num_from(self, source: Peer) -> int:
        return sum(transfer.source == source for transfer in self._incoming)

    def _is_sound(self, num_offered: int, num_computed: int, num_tokens: int, ticket: KVTicket) -> bool:
        """Whether the ticket's blocks hold the KV of that many tokens, with none for the newest token, after
        ``num_offered`` rows. The newest token is not known while an iteration computes KV of all known ones.
        """
        memory, num_rows = self._memory, self._memory.rows_for(num_computed)
        most = num_tokens if ticket.step_id else num_tokens - 1
        if not 0 <= num_computed <= most or num_rows < num_offered:
            return False
        return len(ticket.blocks) == memory.rows.count(num_offered, num_rows, memory.first_seen(num_computed), num_rows)

    def _reserve(self, kv: KVHolding, spec: RequestSpec) -> int | None:
        """Reserve blocks for the tokens so far (``KVMemory.reserve``), if there is room for the rest as well.

        One row for each running request stays free, or what it lacks for the tokens that it has, because accepting into
        these blocks would only cause a preemption. (With windows, a prefill gives up blocks when an iteration ends, and
        takes as many for a later one.) If the policy reserves a request's whole output, that must fit as well.
        """
        memory = self._memory
        num_spare = sum(
            max(memory.rows.num_groups, memory.num_missing(request) if request.is_resident else 0)
            for request in self._steps.running
        )
        if self._reserves_output:
            num_final = min(len(spec.prompt_token_ids) + spec.sampling.max_tokens, self._max_tokens)
            num_spare += max(0, memory.blocks_for(num_final) - memory.blocks_of(kv))
        return memory.reserve(kv, num_spare)

    # --- copying -----------------------------------------------------------------------------------------------------

    def _fetch(self, incoming: _Incoming, stage: Offer | Stage, now: float) -> None:
        """Copy the blocks that a stage offers, except those that the prefix cache had."""
        memory, kv, ticket = self._memory, incoming.kv, stage.ticket
        begin, end = incoming.num_offered, memory.rows_for(stage.num_computed)
        incoming.num_offered, incoming.is_last = end, stage.is_last
        incoming.lacks_token = ticket.step_id > 0
        incoming.computing_s = min(stage.computing_s, _MAX_COMPUTING_S)
        found_end = min(max(begin, incoming.num_found), end)
        num_skipped = memory.rows.count(begin, found_end, kv.first_row, end)
        blocks = tuple(memory.rows.span(kv.blocks, found_end, end, kv.first_row))
        if not blocks:
            self._on_stage_copied(incoming, now)
            return
        transfer = incoming.transfer
        copy_id = memory.pools.begin_fetch(transfer, kv, blocks)
        patience_s = memory.bytes_of_blocks(len(blocks)) / self._min_bytes_per_s + _PATIENCE * incoming.computing_s
        incoming.deadline_s = now + self._timeout_s + patience_s
        access = self._access[transfer.source]
        # A request that was swapped out at the source does not run there, so the copy delays no token.
        is_urgent = stage.is_last and not ticket.on_host
        self._effects.append(Fetch(copy_id, transfer.source, access, ticket, num_skipped, blocks, is_urgent))

    def _on_stage_copied(self, incoming: _Incoming, now: float) -> None:
        incoming.deadline_s = now + self._timeout_s + _PATIENCE * incoming.computing_s
        self._send_copied(incoming)

    def _send_copied(self, incoming: _Incoming) -> None:
        self._effects.send(incoming.transfer.source, Copied(incoming.transfer.id, incoming.stage))

    def _decline(self, transfer: Transfer, reason: DeclineReason) -> None:
        incoming = self._incoming.get(transfer)
        if incoming is not None:
            self._drop(incoming)
        self._effects.send(transfer.source, Declined(transfer.id, reason))

    def _drop(self, incoming: _Incoming) -> None:
        del self._incoming[incoming.transfer]
        self._effects += self._memory.pools.release(incoming.kv)

"""Live migration, the destination's side: KV of requests that are to come from other instances
(``core.migration.source``).

What is copied here belongs to nobody's request until the gateway hands that over (``Start.migration``): only then may
others find it in the prefix cache, too. Until then it is given up at once where the source says so or dies, where the
gateway dies, where copying fails, or where the next step does not come in time. A request that lies here whole is kept
for its time even where the source dies: it may just have been handed over.
"""

import math
from dataclasses import dataclass

from actorserve.core.effects import Effect, Fetch, Send
from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.messages import (
    Copied,
    Declined,
    DeclineReason,
    KVAccess,
    KVTicket,
    MigrationId,
    Offer,
    Peer,
    Stage,
)
from actorserve.core.migration.config import MigrationConfig
from actorserve.core.request import Request

_MAX_FROM_ONE = 16  # requests on their way here from one source
_LEAST_BYTES_PER_S = 2**23  # a copy that is slower where nothing bounds it is given up


@dataclass(slots=True, eq=False)
class _Incoming:
    """A request on its way here. Of its blocks ``num_offered`` are copied or being copied; the first ``num_found`` are
    not, for they lie here.
    """

    id: MigrationId
    request: Request
    num_found: int
    deadline_s: float = math.inf
    stage: int = 0
    num_offered: int = 0
    num_computed: int = 0
    is_last: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all of its KV lies here."""
        return self.is_last and self.request.copy_id is None


class MigrationDestination:
    """What is on its way to one instance."""

    def __init__(self, memory: KVMemory, max_tokens: int, config: MigrationConfig, reserves_output: bool) -> None:
        """``max_tokens``: of the largest request that is served here. ``reserves_output``: as the policy does."""
        self._memory = memory
        self._reserves_output = reserves_output
        self._max_tokens = max_tokens
        self._timeout_s = 2 * config.timeout_s  # from one step to the next
        self._least_bytes_per_s = config.bytes_per_s / 4 if config.bytes_per_s else _LEAST_BYTES_PER_S
        self._access: dict[Peer, KVAccess] = {}  # of the workers that are up
        self._incoming: dict[MigrationId, _Incoming] = {}

    def __len__(self) -> int:
        return len(self._incoming)

    @property
    def requests(self) -> list[Request]:
        """What holds the blocks of those on their way."""
        return [each.request for each in self._incoming.values()]

    @property
    def num_blocks(self) -> int:
        """Blocks that are kept for them."""
        return sum(len(each.request.blocks) for each in self._incoming.values())

    def next_deadline(self) -> float | None:
        return min((each.deadline_s for each in self._incoming.values() if each.deadline_s < math.inf), default=None)

    # --- what others say ---------------------------------------------------------------------------------------------

    def on_peer_up(self, peer: Peer, access: KVAccess | None) -> None:
        if access is not None:
            self._access[peer] = access

    def on_peer_down(self, peer: Peer, now: float) -> None:
        self._access.pop(peer, None)
        for each in list(self._incoming.values()):
            if each.request.gateway == peer or (each.id.source == peer and not each.is_whole):
                self._drop(each)

    def on_offer(self, offer: Offer, source: Peer, num_spare: int, now: float, effects: list[Effect]) -> None:
        """Take a request, if there is room for it beside ``num_spare`` blocks."""
        migration = MigrationId(source, offer.number)
        known = self._incoming.get(migration)
        if known is not None:
            if known.stage == 0 and known.request.copy_id is None:
                effects.append(Send(source, Copied(offer.number, 0)))  # told again: the answer may have been lost
            return
        request = Request(offer.request, offer.epoch, offer.gateway)
        num_tokens = len(request.token_ids)
        reason, num_found = DeclineReason.NO_BLOCKS, None
        if not self._is_sound(offer.num_computed, num_tokens, len(offer.ticket.blocks)):
            reason = DeclineReason.UNKNOWN
        elif source not in self._access:
            reason = DeclineReason.UNREACHABLE
        elif num_tokens < self._max_tokens and sum(each.source == source for each in self._incoming) < _MAX_FROM_ONE:
            num_found = self._reserve(request, num_spare)
        if num_found is None:
            effects.append(Send(source, Declined(offer.number, reason)))
            return
        each = self._incoming[migration] = _Incoming(migration, request, num_found)
        self._fetch(each, offer.ticket, offer.num_computed, offer.is_last, now, effects)

    def on_stage(self, stage: Stage, source: Peer, now: float, effects: list[Effect]) -> None:
        each = self._incoming.get(MigrationId(source, stage.number))
        number = stage.ticket.stage
        if each is not None and each.stage == number:
            if each.request.copy_id is None:
                effects.append(Send(source, Copied(stage.number, number)))
            return
        if each is None or number != each.stage + 1 or each.request.copy_id is not None or each.is_last:
            self._decline(stage.number, source, DeclineReason.UNKNOWN, effects)
            return
        request = each.request
        request.token_ids += stage.token_ids
        num_tokens = len(request.token_ids)
        if not self._is_sound(stage.num_computed, num_tokens, each.num_offered + len(stage.ticket.blocks)):
            self._decline(stage.number, source, DeclineReason.UNKNOWN, effects)
            return
        if num_tokens >= self._max_tokens or not self._memory.extend(request):
            self._decline(stage.number, source, DeclineReason.NO_BLOCKS, effects)
            return
        each.stage = number
        self._fetch(each, stage.ticket, stage.num_computed, stage.is_last, now, effects)

    def on_withdrawn(self, number: int, source: Peer) -> None:
        each = self._incoming.get(MigrationId(source, number))
        if each is not None:
            self._drop(each)

    def on_fetched(self, request: Request, now: float, effects: list[Effect], *, failed: bool = False) -> bool:
        """A copy is done, or failed. Returns whether it was one for here."""
        each = next((each for each in self._incoming.values() if each.request is request), None)
        if each is None:
            return False
        if failed:
            self._drop(each)
            effects.append(Send(each.id.source, Declined(each.id.number, DeclineReason.UNREACHABLE)))
        else:
            self._copied(each, now, effects)
        return True

    def decline_all(self, effects: list[Effect]) -> None:
        """The instance takes nothing any more."""
        for each in list(self._incoming.values()):
            self._drop(each)
            effects.append(Send(each.id.source, Declined(each.id.number, DeclineReason.DRAINING)))

    def on_tick(self, now: float, effects: list[Effect]) -> None:
        for each in list(self._incoming.values()):
            if now >= each.deadline_s:
                self._decline(each.id.number, each.id.source, DeclineReason.UNKNOWN, effects)

    # --- handed over -------------------------------------------------------------------------------------------------

    def adopt(self, migration: MigrationId, request: Request) -> bool:
        """``request`` is the instance's from now on: let it have what was copied. False where that is not all of it."""
        each = self._incoming.get(migration)
        if each is None:
            return False
        if not each.is_whole or each.request.token_ids != request.token_ids:
            self._drop(each)
            return False
        del self._incoming[migration]
        copy = each.request
        request.blocks, copy.blocks = copy.blocks, []
        request.block_names = copy.block_names
        request.num_computed = each.num_computed
        request.num_cached_tokens = 0  # it was admitted where it began
        self._memory.prefixes.share_computed(request, request.num_computed)
        return True

    def _is_sound(self, num_computed: int, num_tokens: int, num_blocks: int) -> bool:
        """Whether so many blocks hold so many of the tokens, of which the newest has no KV."""
        return 0 < num_computed < num_tokens and num_blocks == self._memory.blocks_for(num_computed)

    def _reserve(self, request: Request, num_spare: int) -> int | None:
        """Have blocks for its tokens, where there is room for its whole output too if the policy wants that."""
        if self._reserves_output:
            num_final = min(request.num_prompt + request.sampling.max_tokens, self._max_tokens)
            num_spare += max(0, self._memory.blocks_for(num_final) - self._memory.blocks_of(request))
        return self._memory.reserve(request, num_spare)

    # --- copying -----------------------------------------------------------------------------------------------------

    def _fetch(
        self,
        each: _Incoming,
        ticket: KVTicket,
        num_computed: int,
        is_last: bool,
        now: float,
        effects: list[Effect],
    ) -> None:
        """Copy what a stage offers, but for what was found here."""
        first, end = each.num_offered, each.num_offered + len(ticket.blocks)
        each.num_offered, each.num_computed, each.is_last = end, num_computed, is_last
        num_skipped = min(max(0, each.num_found - first), len(ticket.blocks))
        blocks = tuple(each.request.blocks[first + num_skipped : end])
        if not blocks:
            self._copied(each, now, effects)
            return
        copy_id = self._memory.begin_fetch(each.request, blocks)
        each.deadline_s = now + self._timeout_s + self._memory.bytes_of_blocks(len(blocks)) / self._least_bytes_per_s
        access = self._access[each.id.source]
        # One that was swapped out does not run, so nobody waits for it.
        is_urgent = is_last and not ticket.on_host
        effects.append(Fetch(copy_id, each.id.source, access, ticket, num_skipped, blocks, is_urgent))

    def _copied(self, each: _Incoming, now: float, effects: list[Effect]) -> None:
        each.deadline_s = now + self._timeout_s
        effects.append(Send(each.id.source, Copied(each.id.number, each.stage)))

    def _decline(self, number: int, source: Peer, reason: DeclineReason, effects: list[Effect]) -> None:
        each = self._incoming.get(MigrationId(source, number))
        if each is not None:
            self._drop(each)
        effects.append(Send(source, Declined(number, reason)))

    def _drop(self, each: _Incoming) -> None:
        del self._incoming[each.id]
        self._memory.let_go(each.request)

"""KV checkpoints, the guardian's side: KV of other workers' requests in the host's memory
(``core.checkpoints.source``).
"""

import math
from dataclasses import dataclass

from actorserve.core.effects import Effect, Fetch, Send
from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.messages import (
    Checkpoint,
    CheckpointConfirmed,
    Copied,
    Declined,
    DeclineReason,
    KVAccess,
    MigrationId,
    Peer,
    RequestSpec,
    SamplingParams,
)
from actorserve.core.request import Request

_HOST_SHARE = 2  # this part of the host's pool is left to what is swapped: one half


@dataclass(slots=True, eq=False)
class _Kept:
    """Checkpoints of a request elsewhere: ``num_confirmed`` of its host blocks count. ``stage`` is the last that was
    read, or is being read; its tokens are those of all its blocks.
    """

    id: MigrationId
    gateway: Peer
    request: Request
    stage: int
    num_confirmed: int = 0
    deadline_s: float = math.inf
    was_asked_for: bool = False


class CheckpointStore:
    """What a guardian keeps of others' requests, until they leave, or their gateway or worker dies.

    A dead worker's are kept for ``timeout_s``, in which its gateways will have noticed. While it lives it is asked so
    often whether they are still of use, for what it says may be lost.
    """

    def __init__(self, memory: KVMemory, timeout_s: float) -> None:
        self._memory = memory
        self._timeout_s = timeout_s
        self._access: dict[Peer, KVAccess] = {}
        self._kept: dict[MigrationId, _Kept] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def requests(self) -> list[Request]:
        """What holds the blocks."""
        return [each.request for each in self._kept.values()]

    def next_deadline(self) -> float | None:
        return min((each.deadline_s for each in self._kept.values()), default=None)

    def on_peer_up(self, peer: Peer, access: KVAccess | None) -> None:
        if access is not None:
            self._access[peer] = access

    def on_peer_down(self, peer: Peer, now: float) -> None:
        self._access.pop(peer, None)
        for each in list(self._kept.values()):
            if each.gateway == peer:
                self._drop(each)
            elif each.id.source == peer:
                each.deadline_s, each.was_asked_for = now + self._timeout_s, True

    def on_checkpoint(self, message: Checkpoint, source: Peer, now: float, effects: list[Effect]) -> None:
        """Read on, behind what counts."""
        migration, ticket, memory = MigrationId(source, message.number), message.ticket, self._memory
        if self._is_closed:
            self._decline(migration, DeclineReason.DRAINING, effects)
            return
        each = self._kept.get(migration)
        if each is not None and (each.request.copy_id is not None or ticket.stage <= each.stage):
            if each.request.copy_id is None and ticket.stage == each.stage:
                effects.append(Send(source, Copied(message.number, each.stage)))  # the answer may have been lost
            return
        if each is None and not message.num_confirmed:
            spec = RequestSpec(message.request_id, (), SamplingParams(seed=0, max_tokens=0))
            each = self._kept[migration] = _Kept(
                migration, message.gateway, Request(spec, 0, message.gateway), ticket.stage - 1
            )
        num_tokens, num_told = len(ticket.blocks) * memory.tokens_per_block, len(message.token_ids)
        if (
            each is None
            or not each.num_confirmed <= message.num_confirmed <= len(each.request.host_blocks)
            or not 0 < num_tokens == num_told
        ):
            self._decline(migration, DeclineReason.UNKNOWN, effects)
            return
        request = each.request
        each.num_confirmed = message.num_confirmed  # that it does was said before, but that may have been lost
        self._void_unconfirmed(each)
        each.deadline_s, each.was_asked_for = now + self._timeout_s, False
        if source not in self._access:
            self._decline(migration, DeclineReason.UNREACHABLE, effects)
            return
        blocks = memory.guard(request, len(ticket.blocks), -(-memory.host.num_blocks // _HOST_SHARE))
        if blocks is None:
            self._decline(migration, DeclineReason.NO_BLOCKS, effects)
            return
        each.stage = ticket.stage
        request.token_ids += message.token_ids
        copy_id = memory.begin_fetch(request, blocks, into_host=True)
        access = self._access[source]
        effects.append(Fetch(copy_id, source, access, ticket, 0, blocks, is_urgent=False, into_host=True))

    def on_fetched(self, request: Request, effects: list[Effect], *, failed: bool = False) -> bool:
        """A copy is done, or failed. Returns whether it was one for here."""
        each = next((each for each in self._kept.values() if each.request is request), None)
        if each is None:
            return False
        if failed:
            each.stage -= 1
            self._void_unconfirmed(each)
            self._decline(each.id, DeclineReason.UNREACHABLE, effects)
        else:
            effects.append(Send(each.id.source, Copied(each.id.number, each.stage)))
        return True

    def on_confirmed(self, message: CheckpointConfirmed, source: Peer, now: float) -> None:
        each = self._kept.get(MigrationId(source, message.number))
        if each is None:
            return
        each.deadline_s, each.was_asked_for = now + self._timeout_s, False
        if each.stage == message.stage and each.request.copy_id is None:
            each.num_confirmed = len(each.request.host_blocks)

    def on_withdrawn(self, number: int, source: Peer) -> None:
        each = self._kept.get(MigrationId(source, number))
        if each is not None:
            self._drop(each)

    def give_up(self, num_blocks: int) -> None:
        """What is swapped goes first: drop checkpoints, the oldest first, until so many host blocks are free."""
        for each in list(self._kept.values()):
            if self._memory.host.num_free_blocks >= num_blocks:
                return
            if each.request.copy_id is None:
                self._drop(each)

    def let_all_go(self) -> None:
        """The instance takes nothing any more."""
        self._is_closed = True
        for each in list(self._kept.values()):
            self._drop(each)

    def on_tick(self, now: float, effects: list[Effect]) -> None:
        for each in list(self._kept.values()):
            if now < each.deadline_s:
                continue
            if each.was_asked_for:
                self._drop(each)
            else:
                each.deadline_s, each.was_asked_for = now + self._timeout_s, True
                if each.request.copy_id is None:
                    effects.append(Send(each.id.source, Copied(each.id.number, each.stage)))

    def adopt(self, migration: MigrationId, request: Request) -> bool:
        """``request`` is the instance's from now on: let it have what counts, as if it had been swapped out."""
        each = self._kept.pop(migration, None)
        if each is None:
            return False
        memory, kept = self._memory, each.request
        # The gateway may not have got the newest tokens; and one has to be fed, to get the next.
        num_blocks = min(each.num_confirmed, (len(request.token_ids) - 1) // memory.tokens_per_block)
        num_tokens = num_blocks * memory.tokens_per_block
        if kept.token_ids[:num_tokens] != request.token_ids[:num_tokens]:
            num_blocks = 0
        request.host_blocks, kept.host_blocks = kept.host_blocks[:num_blocks], kept.host_blocks[num_blocks:]
        memory.num_checkpoint_blocks -= num_blocks
        memory.let_go(kept)
        if not num_blocks:
            return False
        request.num_computed = num_tokens
        request.num_cached_tokens = 0  # it was admitted where it began
        return True

    def _decline(self, migration: MigrationId, reason: DeclineReason, effects: list[Effect]) -> None:
        """What counts already stays, where only this read came to nothing."""
        each = self._kept.get(migration)
        is_kept = reason in (DeclineReason.NO_BLOCKS, DeclineReason.UNREACHABLE)
        if each is not None and not (is_kept and each.num_confirmed):
            self._drop(each)
        effects.append(Send(migration.source, Declined(migration.number, reason)))

    def _void_unconfirmed(self, each: _Kept) -> None:
        self._memory.release_checkpoint(each.request, each.num_confirmed)
        del each.request.token_ids[each.num_confirmed * self._memory.tokens_per_block :]

    def _drop(self, each: _Kept) -> None:
        del self._kept[each.id]
        self._memory.let_go(each.request)

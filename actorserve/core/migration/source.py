"""Live migration (Llumnix, section 4.2), the source's side: a request moves to another instance and hardly pauses.

KV is only ever appended to, so blocks that were copied stay right. Stage 0 copies all full blocks while the request
goes on decoding, and each later stage copies the blocks filled since. When little is left, the request is *paused*: it
joins no further batch. When the steps in flight have ended, the last stage copies the rest, and the source asks the
request's gateway to hand it over. The newest token has no KV yet, so the KV of all tokens but one is copied. Layers
with a window give blocks up meanwhile. No later token sees these, and from each stage's number of computed tokens the
destination knows that it may give them up, too.

Differences from the paper and from systems built on it:

- The destination reads (``Fetch``); the source never writes there. So a source that was suspended or considered dead
  can never write into blocks that have a new owner. A destination that reads too late reads garbage, but nothing uses
  it: a source asks for the hand-over only if it still had the request's blocks unchanged after all were copied, and the
  iteration that wrote them has ended.
- The gateway commits by issuing the new epoch (``core.gateway.state``); source and destination only propose. The source
  repeats its HandOver until it is answered. If either side dies meanwhile, the gateway fails the request over or has
  the source keep it.
- If a request is handed to a destination that has no copy any more, the destination computes its KV again. So a copy
  only ever saves time, and may be given up at any moment.
- A request without KV moves by the hand-over alone, also if it has a token instance: it keeps that where it goes. A
  request that is swapped out moves in a single stage, out of the host's pool. A request in prefill stays.

A handoff (Splitwise, section 4.3) is a migration whose first stages run while the prompt does. It begins with the
prompt's first iteration, and the first offer reserves blocks for the whole prompt. Each stage copies the chunks that
ended since. The request is paused once its last chunk is planned, so that no decode runs before the last stage. That is
offered while the last chunk is computed, if the destination can follow an iteration (``KVAccess.progress``), layer by
layer where that pays (``layer_copies``). Without live migration all is copied after the prompt. The first token leaves
from here, and the second one comes from the destination. A prompt that is preempted is handed off again from its
beginning. If the destination declines, dies or is too slow, the request decodes here until the coordinator moves it.

Each stage has a deadline, and the destination may decline it. The source gives up if the request finished, left, or was
preempted. It sends Withdrawn; if that is lost, the destination's deadline passes.
``core.migration.destination`` is the destination's side.
"""

import math
from collections.abc import Mapping

from actorserve.core.effects import Effects, Meet
from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.kv.tickets import make_ticket
from actorserve.core.messages import (
    Copied,
    Declined,
    HandOver,
    Keep,
    KVAccess,
    Message,
    MigrateTo,
    Peer,
    TransferId,
    TransferKind,
    Withdrawn,
)
from actorserve.core.migration.candidates import MigrationCandidates
from actorserve.core.migration.config import LayerCopies, MigrationConfig, MigrationMode
from actorserve.core.migration.layer_copies import is_by_layer
from actorserve.core.migration.outgoing import Outgoing, Phase, Target
from actorserve.core.participant import Handler, Participant, Running
from actorserve.core.request import Request
from actorserve.core.scheduling.policy import SchedulingPolicy
from actorserve.core.timing.step_times import StepTimes

_MAX_STAGES = 8  # before the last one, because a link slower than decoding never catches up
_ORDER_S = 10.0  # how long an operator's order to move a request waits until the request can move
_PATIENCE = 4.0  # a stage may take this many times the expected time of its copy


class MigrationSource(Participant):
    """Chooses requests to migrate, and runs each migration stage by stage until it is committed or cancelled."""

    kind = TransferKind.MIGRATION

    def __init__(
        self,
        config: MigrationConfig,
        retry_s: float,
        memory: KVMemory,
        policy: SchedulingPolicy,
        times: StepTimes,
        requests: Mapping[str, Request],
        steps: Running,
        effects: Effects,
    ) -> None:
        """``requests`` are the instance's. ``retry_s``: after this time a gateway is asked again."""
        self.paused: set[Request] = set()  # join no further batch, and are not preempted; never iterated
        self.num_migrated = 0
        self.num_failed = 0
        self.migrated_bytes = 0
        self._config = config
        self._retry_s = retry_s
        self._memory = memory
        self._policy = policy
        self._times = times
        self._requests = requests
        self._steps = steps
        self._effects = effects
        self._candidates = MigrationCandidates(requests, memory, times, config.bytes_per_s)
        self._key = bytes.fromhex(config.ticket_key)
        self._target: Target | None = None
        self._peers: set[Peer] = set()
        self._followers: set[Peer] = set()  # can copy KV that an iteration still writes
        self._outgoing: dict[str, Outgoing] = {}  # by request id
        self._ordered: dict[str, tuple[Peer, float]] = {}  # operators' orders: where to, and until when, by request id
        self._to_hand_off: dict[str, Peer] = {}  # requests in prefill and their token instances, by request id
        self._num_transfers = 0

    def __len__(self) -> int:
        return len(self._outgoing)

    @property
    def wants_step_end(self) -> bool:
        """Whether a last stage waits for a step's end, or a new move may begin then."""
        target = self._target
        if target is not None and target.to in self._peers and self._num_moves < self._config.max_outgoing:
            return True
        if self._ordered or self._to_hand_off:
            return True
        return any(outgoing.phase in (Phase.LAST_DUE, Phase.ALL_COPIED) for outgoing in self._outgoing.values())

    @property
    def _num_moves(self) -> int:
        """The requests in flight, without handoffs, because these are bounded by the prompts in an iteration."""
        return sum([not outgoing.is_handoff for outgoing in self._outgoing.values()])

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        return {MigrateTo: self._on_migrate_to, Keep: self._on_keep}

    @property
    def transfer_handlers(self) -> Mapping[type[Message], Handler]:
        return {Copied: self._on_copied, Declined: self._on_declined}

    def next_deadline(self) -> float | None:
        deadlines = (outgoing.deadline_s for outgoing in self._outgoing.values())
        return min((deadline_s for deadline_s in deadlines if deadline_s < math.inf), default=None)

    def validate(self) -> None:
        for request_id, outgoing in self._outgoing.items():
            assert self._requests.get(request_id) is outgoing.request, f"{request_id} moves, but is not here"
            is_paused = outgoing.request in self.paused
            must_pause = outgoing.is_last or outgoing.phase in (Phase.LAST_DUE, Phase.HANDING_OVER)
            may_pause = must_pause or (outgoing.is_handoff and outgoing.phase is Phase.COPYING)
            assert must_pause <= is_paused <= may_pause, f"{request_id} is paused too early or too late"
            waits_for_step = outgoing.phase is Phase.LAST_DUE
            has_ended = not self._steps.is_running(outgoing.request)
            assert waits_for_step <= is_paused, f"{request_id} is paused until its last stage"
            assert not (waits_for_step and has_ended), f"the last stage of {request_id} is overdue"
            may_run = waits_for_step or (outgoing.followed is not None and outgoing.phase is not Phase.HANDING_OVER)
            assert not must_pause or may_run or has_ended, f"the last stage of {request_id} began too early"
            assert outgoing.phase is not Phase.ALL_COPIED or not has_ended, f"{request_id} is to be handed over now"
        moving = {id(outgoing.request) for outgoing in self._outgoing.values()}
        assert all(id(request) in moving for request in self.paused), "a request is paused, but does not move"
        assert self._num_moves <= self._config.max_outgoing, "too many requests move at once"

    # --- messages and events -----------------------------------------------------------------------------------------

    def _on_migrate_to(self, message: MigrateTo, sender: Peer, now: float) -> None:
        self._target = None
        if message.num_bytes:
            until_s = now + message.ttl_s
            self._target = Target(message.destination, message.num_bytes, until_s, message.decoding_only)
            if message.destination not in self._peers:
                self._effects.append(Meet(message.destination))

    def order(self, request_id: str, to: Peer, now: float, *, dry_run: bool) -> str | None:
        """An operator wants this request, which is here, to move to that worker. It moves as soon as it can, unless
        that takes too long. Returns why it cannot move; None if it is ordered.
        """
        outgoing = self._outgoing.get(request_id)
        if outgoing is not None:
            return f"it is moving to {outgoing.to.name} already"
        if not dry_run:
            self._ordered[request_id] = to, now + _ORDER_S
            if to not in self._peers:
                self._effects.append(Meet(to))
        return None

    def hand_off(self, request: Request, to: Peer) -> None:
        """Have ``to`` decode this request, which has just come, after its prompt."""
        self._to_hand_off[request.request_id] = to
        if to not in self._peers:
            self._effects.append(Meet(to))

    def hands_off(self, request: Request) -> bool:
        """Whether the request, whose prompt is computed here, is on its way to a token instance."""
        outgoing = self._outgoing.get(request.request_id)
        return outgoing is not None and outgoing.is_handoff

    def on_peer_up(self, peer: Peer, access: KVAccess | None) -> None:
        self._peers.add(peer)
        if access is not None and access.progress:
            self._followers.add(peer)

    def on_peer_down(self, peer: Peer, now: float) -> None:
        """A request that is being handed over waits for its gateway; only the gateway knows whether it moved."""
        self._peers.discard(peer)
        self._followers.discard(peer)
        self._drop_target(peer)
        self._ordered = {name: order for name, order in self._ordered.items() if order[0] != peer}
        self._to_hand_off = {name: to for name, to in self._to_hand_off.items() if to != peer}
        for outgoing in list(self._outgoing.values()):
            if outgoing.to == peer and outgoing.phase is not Phase.HANDING_OVER:
                self._cancel(outgoing)

    def _on_copied(self, message: Copied, sender: Peer, now: float) -> bool:
        outgoing = self._find(message.transfer, sender)
        if outgoing is None:
            self._effects.send(sender, Withdrawn(message.transfer))  # an earlier Withdrawn may have been lost
            return False
        if outgoing.phase is not Phase.COPYING or message.stage != outgoing.stage:
            return False
        if outgoing.stage_bytes and outgoing.followed is None:
            self._times.observe_transfer(outgoing.stage_bytes, now - outgoing.began_s)
        if self._is_void(outgoing):
            self._give_up_void(outgoing)
            return True
        if outgoing.is_last:
            if self._steps.is_running(outgoing.request):
                outgoing.phase, outgoing.deadline_s = Phase.ALL_COPIED, math.inf
            else:
                self._ask_to_hand_over(outgoing, now)
            return True
        if outgoing.is_handoff:
            outgoing.phase, outgoing.deadline_s = Phase.AWAITING, math.inf
            return True  # what follows is settled at once
        size = self._memory.tokens_per_block
        num_full = outgoing.request.num_computed // size
        if num_full > outgoing.num_offered and outgoing.stage + 1 < _MAX_STAGES:
            outgoing.stage += 1
            self._offer(outgoing, num_full * size, now)
        else:
            outgoing.phase = Phase.LAST_DUE
            outgoing.deadline_s = math.inf
            self.paused.add(outgoing.request)
        return True

    def _on_declined(self, message: Declined, sender: Peer, now: float) -> bool:
        outgoing = self._find(message.transfer, sender)
        if outgoing is None or outgoing.phase is Phase.HANDING_OVER:
            return False
        self._cancel(outgoing)
        self._drop_target(sender)
        return True

    def _on_keep(self, message: Keep, sender: Peer, now: float) -> bool:
        """The gateway does not hand the request over."""
        outgoing = self._outgoing.get(message.request_id)
        if outgoing is None or outgoing.phase is not Phase.HANDING_OVER or outgoing.request.epoch != message.epoch:
            return False
        self._withdraw(outgoing)
        self._cancel(outgoing)
        self._drop_target(outgoing.to)
        return True

    def on_gone(self, request: Request) -> None:
        self._to_hand_off.pop(request.request_id, None)
        if request.finish_reason is not None:
            self._candidates.on_finished(request)
        outgoing = self._outgoing.get(request.request_id)
        if outgoing is None or outgoing.request is not request:
            return
        del self._outgoing[request.request_id]
        self.paused.discard(request)
        if outgoing.phase is Phase.HANDING_OVER:
            # No Withdrawn, because the destination is likely to need the copy right now.
            self.num_migrated += 1
            self.migrated_bytes += outgoing.kv_bytes
        else:
            self.num_failed += request.finish_reason is None  # a request that finishes first is no failure
            self._withdraw(outgoing)

    def on_tick(self, now: float) -> None:
        for outgoing in list(self._outgoing.values()):
            if now < outgoing.deadline_s:
                continue
            if outgoing.phase is Phase.HANDING_OVER:
                self._ask_to_hand_over(outgoing, now)
            else:
                self._withdraw(outgoing)
                self._cancel(outgoing)

    # --- stages ------------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        """Give up moves that preemption has voided, begin last stages that are due, and begin new moves."""
        target = self._target
        if not self._outgoing and target is None and not self._ordered:
            return
        for outgoing in list(self._outgoing.values()):
            request = outgoing.request
            if outgoing.is_handoff and not self._is_void(outgoing):
                self._follow_prompt(outgoing, now)
            if outgoing.phase is Phase.LAST_DUE:
                if not self._steps.is_running(request):
                    self._begin_last_stage(outgoing, now)
            elif outgoing.phase is Phase.ALL_COPIED:
                if not self._steps.is_running(request):
                    self._ask_to_hand_over(outgoing, now)
            elif self._is_void(outgoing):
                self._give_up_void(outgoing)
        if self._ordered:
            self._begin_ordered(now)
        if target is None:
            return
        if now >= target.until_s:
            self._target = None
        elif target.to in self._peers:
            self._begin(target, now)

    def _is_void(self, outgoing: Outgoing) -> bool:
        """Whether a stage in flight names blocks that the request has lost. The destination may read other requests' KV
        there. Preemption takes blocks, but not of a paused request.
        """
        request = outgoing.request
        if outgoing.followed is not None and outgoing.phase is Phase.COPYING:
            return not outgoing.has_followed_blocks
        return request not in self.paused and (request.blocks is not outgoing.blocks or request.copy_id is not None)

    def _begin(self, target: Target, now: float) -> None:
        while self._num_moves < self._config.max_outgoing:
            request = self._candidates.choose(target.num_bytes, self._outgoing, decoding_only=target.decoding_only)
            if request is None:
                return
            target.num_bytes -= self._memory.bytes_of(request)
            self._move(request, target.to, now)

    def _begin_ordered(self, now: float) -> None:
        for request_id, (to, until_s) in list(self._ordered.items()):
            request = self._requests.get(request_id)
            if request is None or now >= until_s:
                del self._ordered[request_id]
            elif (
                to in self._peers
                and request_id not in self._outgoing
                and self._num_moves < self._config.max_outgoing
                and self._candidates.can_move(request)
            ):
                del self._ordered[request_id]
                self._move(request, to, now)

    def begin_handoffs(self, now: float) -> None:
        """Begin the handoffs of the requests whose prompts are computed from now on. One that already decodes, because
        its token instance was not known here before, moves as other requests do.
        """
        for request_id, to in list(self._to_hand_off.items()):
            request = self._requests[request_id]
            if to not in self._peers or request_id in self._outgoing or not request.is_resident:
                continue
            if request.num_output <= request.resumed_output + 1:
                self._begin_handoff(request, to, now)
            elif self._candidates.can_move(request) and self._num_moves < self._config.max_outgoing:
                self._move(request, to, now)
            else:
                continue
            del self._to_hand_off[request_id]

    def _begin_handoff(self, request: Request, to: Peer, now: float) -> None:
        outgoing = self._new_outgoing(request, to, Phase.AWAITING, is_handoff=True)
        is_computing = request.num_without_kv > 1
        # Which rows of windowed layers a prefix cache may fill is known only with the first computed row.
        if self._config.mode is MigrationMode.LIVE and is_computing and not self._memory.rows.num_windowed:
            size = self._memory.tokens_per_block
            self._offer(outgoing, request.num_computed // size * size, now)
        self._follow_prompt(outgoing, now)
        if outgoing.phase is Phase.LAST_DUE and not self._steps.is_running(request):
            self._begin_last_stage(outgoing, now)

    def _follow_prompt(self, outgoing: Outgoing, now: float) -> None:
        """Offer what has been computed of the prompt, and pause the request once its last chunk is planned."""
        request, size = outgoing.request, self._memory.tokens_per_block
        if outgoing.is_last or outgoing.phase is Phase.HANDING_OVER:
            return
        if request.num_uncomputed == 1:
            self.paused.add(request)
        if outgoing.phase is not Phase.AWAITING:
            return
        is_running, is_live = self._steps.is_running(request), self._config.mode is MigrationMode.LIVE
        is_computing = request not in self.paused or is_running
        has_more = is_live and request.num_computed // size > outgoing.num_offered
        if request in self.paused and is_running and is_live and self._can_follow(outgoing):
            outgoing.is_last = True
            outgoing.followed_from = outgoing.num_offered
            outgoing.followed = request.blocks[outgoing.num_offered : self._memory.rows_for(request.num_fed)]
            outgoing.stage += 1 if outgoing.num_told else 0
            self._offer(outgoing, request.num_fed, now)
        elif is_computing and has_more:
            outgoing.stage += 1 if outgoing.num_told else 0
            self._offer(outgoing, request.num_computed // size * size, now)
        elif request in self.paused:
            outgoing.phase = Phase.LAST_DUE

    def _can_follow(self, outgoing: Outgoing) -> bool:
        """Whether the destination can copy what the newest step of the request computes while it is computed."""
        request = outgoing.request
        knows_tokens = request.num_fed == len(request.token_ids)
        if self._config.layer_copies is LayerCopies.AFTER:
            return False
        return knows_tokens and outgoing.to in self._followers and not self._memory.rows.num_windowed

    def _new_outgoing(self, request: Request, to: Peer, phase: Phase, *, is_handoff: bool = False) -> Outgoing:
        self._num_transfers += 1
        transfer = TransferId(self.kind, self._num_transfers)
        outgoing = Outgoing(transfer, request, to, phase, request.blocks, math.inf, is_handoff)
        self._outgoing[request.request_id] = outgoing
        return outgoing

    def _move(self, request: Request, to: Peer, now: float) -> None:
        outgoing = self._new_outgoing(request, to, Phase.LAST_DUE)
        size = self._memory.tokens_per_block
        num_full = request.num_computed // size
        if self._config.mode is MigrationMode.LIVE and request.is_resident and num_full:
            self._offer(outgoing, num_full * size, now)
            return
        self.paused.add(request)
        if not self._steps.is_running(request):
            self._begin_last_stage(outgoing, now)

    def _begin_last_stage(self, outgoing: Outgoing, now: float) -> None:
        request = outgoing.request
        if self._config.mode is MigrationMode.RECOMPUTE:
            self._memory.drop(request)
        if not request.is_started:
            self._ask_to_hand_over(outgoing, now)
            return
        outgoing.is_last = True
        outgoing.stage += 1 if outgoing.num_told else 0
        self._offer(outgoing, request.num_computed, now)

    def _offer(self, outgoing: Outgoing, num_computed: int, now: float) -> None:
        """Offer a stage: the rows up to the one that ends with, or holds, token number ``num_computed``."""
        request, memory = outgoing.request, self._memory
        num_rows = memory.rows_for(num_computed)
        held = request.host_blocks if request.is_swapped else request.blocks
        blocks = tuple(memory.rows.span(held, outgoing.num_offered, num_rows, memory.first_seen(num_computed)))
        outgoing.stage_bytes = self._memory.bytes_of_blocks(len(blocks))
        computing_s, step_id, by_layer = 0.0, 0, False
        if outgoing.followed is not None:
            computing_s, step_id = self._steps.left_s(request, now), request.last_step
            by_layer = is_by_layer(self._config, self._times, outgoing.stage_bytes, computing_s)
        elif not outgoing.is_last:
            computing_s = self._times.prefill_s(request.num_without_kv - 1, request.num_computed)
        names = self._key, outgoing.id, outgoing.stage, blocks
        ticket = make_ticket(*names, on_host=request.is_swapped, step_id=step_id, by_layer=by_layer)
        self._effects.send(outgoing.to, outgoing.message(num_computed, ticket, computing_s))
        outgoing.num_told = len(request.token_ids)
        outgoing.num_offered = num_rows
        outgoing.phase = Phase.COPYING
        outgoing.began_s = now
        expected_s = self._candidates.copy_s(outgoing.stage_bytes) + (computing_s if step_id else 0.0)
        outgoing.deadline_s = now + self._config.timeout_s + _PATIENCE * expected_s

    def _ask_to_hand_over(self, outgoing: Outgoing, now: float) -> None:
        request = outgoing.request
        outgoing.phase = Phase.HANDING_OVER
        outgoing.kv_bytes = self._memory.bytes_of(request)
        outgoing.deadline_s = now + self._retry_s
        transfer = outgoing.id if outgoing.is_last else None
        attained = self._policy.attained(request, now)
        hand_over = HandOver(
            request.request_id,
            request.epoch,
            outgoing.to,
            transfer,
            request.num_output,
            attained,
            self._steps.energy_of(request),
        )
        self._effects.send(request.gateway, hand_over)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _cancel(self, outgoing: Outgoing) -> None:
        """The request does not move, and goes on here."""
        self.num_failed += 1
        del self._outgoing[outgoing.request.request_id]
        self.paused.discard(outgoing.request)

    def _give_up_void(self, outgoing: Outgoing) -> None:
        """The request has lost the blocks that were copied. A handoff begins again when the prompt does."""
        self._withdraw(outgoing)
        self._cancel(outgoing)
        if outgoing.is_handoff:
            self._to_hand_off[outgoing.request.request_id] = outgoing.to

    def _drop_target(self, to: Peer) -> None:
        """Stop moving requests there: it has no room, is draining, or is down. The coordinator will notice."""
        if self._target is not None and self._target.to == to:
            self._target = None

    def _withdraw(self, outgoing: Outgoing) -> None:
        if outgoing.num_told:
            self._effects.send(outgoing.to, Withdrawn(outgoing.id))

    def _find(self, transfer: TransferId, sender: Peer) -> Outgoing | None:
        return next(
            (outgoing for outgoing in self._outgoing.values() if outgoing.id == transfer and outgoing.to == sender),
            None,
        )

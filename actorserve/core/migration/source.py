"""Live migration (Llumnix, section 4.2), the source's side: a request moves to another instance and hardly stops.

KV is only ever appended to, so what was copied stays right. Stage 0 copies all full blocks while the request goes on
decoding, each later stage what has filled since. When little is left, the request leaves the batch at a step's end and
*stands still*; the last stage copies the rest, and the source asks the request's gateway to hand it over. The newest
token has no KV yet: one less than all tokens is shipped.

What differs from the paper, and from what was built after it:

- The destination reads (``Fetch``), the source never writes there. A source that was paused, or was held for dead, can
  thus never write into blocks that are somebody else's by now. A destination that reads too late reads garbage, and
  nobody ever uses that: a request is handed over only by a source that still has it as it was, after all was copied.
- The gateway commits, by the new epoch (``core.gateway.state``); source and destination only propose. The source asks
  until it is answered; whoever dies meanwhile, the gateway fails the request over or has the source keep it.
- A destination that holds no copy any more when the request is handed to it computes its KV anew. So a copy is never
  more than a way to save time, and may be given up at any moment.
- A request that has no KV moves by handing over alone; one that is swapped out moves in a single stage, out of the
  host's pool; one that is in prefill stays.

Each step has a deadline. Blocks are reserved stage by stage, and the answer may be no. A source gives up where its
request finished, left, or was preempted; it says so, or its silence does. ``core.migration.destination`` is the
destination's side.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from actorserve.core.effects import Effect, Meet, Send
from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.kv.tickets import make_ticket
from actorserve.core.messages import (
    Copied,
    Declined,
    HandOver,
    KVAccess,
    MigrateTo,
    Offer,
    Peer,
    Stage,
    Withdrawn,
)
from actorserve.core.migration.config import MigrationConfig, MigrationMode
from actorserve.core.request import Request
from actorserve.core.scheduling.policy import SchedulingPolicy
from actorserve.core.timing.step_times import StepTimes

_MAX_STAGES = 8  # before the last one: a link that is slower than decoding never catches up
_PATIENCE = 4.0  # times what a copy should take
_GAIN = 0.05  # of the last request in the mean of how much they made


class _Phase(Enum):
    COPYING = auto()  # a stage is offered, and not copied yet
    LAST_DUE = auto()  # it leaves the batch once the step in flight is done
    HANDING_OVER = auto()  # the gateway is asked


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A request on its way out. ``blocks`` is the very list of its blocks when it began: another one means that it was
    preempted. Of these ``num_offered`` are copied or being copied, and ``num_told`` of its tokens are told.
    """

    number: int
    request: Request
    to: Peer
    phase: _Phase
    blocks: list[int]
    deadline_s: float
    stage: int = 0
    num_offered: int = 0
    num_told: int = 0
    is_last: bool = False
    began_s: float = 0.0  # this stage
    stage_bytes: int = 0
    kv_bytes: int = 0  # of all of its tokens, when it was to be handed over


@dataclass(slots=True)
class _Order:
    """Where the coordinator wants requests to go."""

    to: Peer
    num_bytes: int
    until_s: float


class MigrationSource:
    """The source's side: chooses requests, and sees each through until it is gone or stays."""

    def __init__(
        self,
        config: MigrationConfig,
        memory: KVMemory,
        policy: SchedulingPolicy,
        times: StepTimes,
        requests: dict[str, Request],
        tokens_per_block: int,
        retry_s: float,
    ) -> None:
        """``requests``: those of the instance, which it adds to and takes from."""
        self._config = config
        self._key = bytes.fromhex(config.ticket_key)
        self._memory = memory
        self._policy = policy
        self._times = times
        self._requests = requests
        self._tokens_per_block = tokens_per_block
        self._retry_s = retry_s
        self._order: _Order | None = None
        self._peers: set[Peer] = set()
        self._outgoing: dict[str, _Outgoing] = {}  # by request id
        self._numbers = 0
        self.paused: set[Request] = set()  # only looked up: in no batch, and not preempted
        self._mean_output = math.inf  # tokens of requests that ended here, lately
        self.num_migrated = 0
        self.num_failed = 0
        self.migrated_bytes = 0

    def __len__(self) -> int:
        return len(self._outgoing)

    @property
    def is_busy(self) -> bool:
        """Whether there is something to ``settle``."""
        return bool(self._outgoing) or self._order is not None

    @property
    def wants_step_end(self) -> bool:
        """Whether something waits for the end of the step in flight: a last stage, or room among those that move."""
        order = self._order
        if order is not None and order.to in self._peers and len(self._outgoing) < self._config.max_outgoing:
            return True
        return any(each.phase is _Phase.LAST_DUE for each in self._outgoing.values())

    def next_deadline(self) -> float | None:
        return min((each.deadline_s for each in self._outgoing.values() if each.deadline_s < math.inf), default=None)

    # --- what others say ---------------------------------------------------------------------------------------------

    def on_order(self, message: MigrateTo, now: float, effects: list[Effect]) -> None:
        self._order = None
        if message.num_bytes:
            self._order = _Order(message.destination, message.num_bytes, now + message.ttl_s)
            if message.destination not in self._peers:
                effects.append(Meet(message.destination))

    def on_peer_up(self, peer: Peer, access: KVAccess | None) -> None:
        self._peers.add(peer)

    def on_peer_down(self, peer: Peer, now: float) -> None:
        """Another worker is gone. Who is being handed over waits for the gateway, which alone knows."""
        self._peers.discard(peer)
        self._end_order(peer)
        for each in list(self._outgoing.values()):
            if each.to == peer and each.phase is not _Phase.HANDING_OVER:
                self._stay(each)

    def knows(self, number: int, to: Peer) -> bool:
        """Whether a request is on its way there under this number."""
        return self._find(number, to) is not None

    def on_copied(self, message: Copied, sender: Peer, now: float, effects: list[Effect]) -> bool:
        """Returns whether that was expected."""
        each = self._find(message.number, sender)
        if each is None or each.phase is not _Phase.COPYING or message.stage != each.stage:
            return False
        if each.stage_bytes:
            self._times.observe_transfer(each.stage_bytes, now - each.began_s)
        if each.is_last:
            self._ask_to_hand_over(each, now, effects)
            return True
        num_full = each.request.num_computed // self._tokens_per_block
        if num_full > each.num_offered and each.stage + 1 < _MAX_STAGES:
            each.stage += 1
            self._offer(each, num_full * self._tokens_per_block, now, effects)
        else:
            each.phase = _Phase.LAST_DUE
            each.deadline_s = math.inf
        return True

    def on_declined(self, message: Declined, sender: Peer) -> bool:
        """Returns whether that was expected."""
        each = self._find(message.number, sender)
        if each is None or each.phase is _Phase.HANDING_OVER:
            return False
        self._stay(each)
        self._end_order(sender)
        return True

    def on_keep(self, request_id: str, epoch: int, effects: list[Effect]) -> bool:
        """The gateway does not hand it over. Returns whether that was expected."""
        each = self._outgoing.get(request_id)
        if each is None or each.phase is not _Phase.HANDING_OVER or each.request.epoch != epoch:
            return False
        self._withdraw(each, effects)
        self._stay(each)
        self._end_order(each.to)
        return True

    def on_gone(self, request: Request, effects: list[Effect]) -> None:
        """The instance has forgotten a request: it ended, left, or is somebody else's now."""
        if request.finish_reason is not None:
            mean, num_output = self._mean_output, request.num_output
            self._mean_output = num_output if mean == math.inf else mean + _GAIN * (num_output - mean)
        each = self._outgoing.get(request.request_id)
        if each is None or each.request is not request:
            return
        del self._outgoing[request.request_id]
        self.paused.discard(request)
        if each.phase is _Phase.HANDING_OVER:
            # Not withdrawn: the copy is likely to be wanted just now.
            self.num_migrated += 1
            self.migrated_bytes += each.kv_bytes
        else:
            self.num_failed += request.finish_reason is None  # that it is done first is nobody's failure
            self._withdraw(each, effects)

    def on_tick(self, now: float, effects: list[Effect]) -> None:
        for each in list(self._outgoing.values()):
            if now < each.deadline_s:
                continue
            if each.phase is _Phase.HANDING_OVER:
                self._ask_to_hand_over(each, now, effects)
            else:
                self._withdraw(each, effects)
                self._stay(each)

    # --- what follows ------------------------------------------------------------------------------------------------

    def settle(self, running: Collection[Request], now: float, effects: list[Effect]) -> None:
        """After whatever happened, before the next iteration is planned: ``running`` are those in the step in flight.

        Gives up whom preemption has voided, has those stand still whose last stage is due, and begins new ones.
        """
        for each in list(self._outgoing.values()):
            request = each.request
            if request in self.paused:
                continue
            if request.blocks is not each.blocks or request.copy_id is not None:
                self._withdraw(each, effects)
                self._stay(each)
            elif each.phase is _Phase.LAST_DUE and request not in running:
                self._begin_last_stage(each, now, effects)
        order = self._order
        if order is None:
            return
        if now >= order.until_s:
            self._order = None
        elif order.to in self._peers:
            self._begin(order, running, now, effects)

    def _begin(self, order: _Order, running: Collection[Request], now: float, effects: list[Effect]) -> None:
        while len(self._outgoing) < self._config.max_outgoing:
            request = self._choose(order, running)
            if request is None:
                return
            order.num_bytes -= self._memory.bytes_of(request)
            self._numbers += 1
            each = _Outgoing(self._numbers, request, order.to, _Phase.LAST_DUE, request.blocks, math.inf)
            self._outgoing[request.request_id] = each
            num_full = request.num_computed // self._tokens_per_block
            if self._config.mode is MigrationMode.LIVE and request.is_resident and num_full:
                self._offer(each, num_full * self._tokens_per_block, now, effects)
            elif request not in running:
                self._begin_last_stage(each, now, effects)

    def _choose(self, order: _Order, running: Collection[Request]) -> Request | None:
        """The one to move: of low priority first (a larger number is less urgent), then one that costs no copy, then a
        short one (section 4.4.3), if it fits into what is left of the order.
        """
        movable = (
            request
            for request in self._requests.values()
            if request.request_id not in self._outgoing
            and self._can_move(request, running)
            and self._memory.bytes_of(request) <= order.num_bytes
            and self._pays(request)
        )
        return min(
            movable,
            key=lambda request: (-request.spec.priority, request.is_started, len(request.token_ids)),
            default=None,
        )

    def _can_move(self, request: Request, running: Collection[Request]) -> bool:
        if not request.is_started:
            return request not in running
        # Who was handed over to here makes a token before it leaves: else orders that cross send it to and fro in vain.
        has_run = request.num_output > request.resumed_output
        return has_run and request.copy_id is None and request.num_uncomputed == 1

    def _pays(self, request: Request) -> bool:
        """Whether it is likely to run for longer than copying takes: else nothing is gained. How much longer that is
        nobody knows; where lengths have heavy tails as long as it ran already is a fair guess, and until then, up to
        what requests have come to here.
        """
        if not request.is_started:
            return True
        num_output = request.num_output
        num_left = min(request.sampling.max_tokens - num_output, max(num_output, self._mean_output - num_output))
        copy_s = self._copy_s(self._memory.bytes_of(request))
        return num_left * self._times.decode_s(1, len(request.token_ids)) > copy_s

    def _copy_s(self, num_bytes: int) -> float:
        """What a copy should take: as measured, but no less than what the link is bound to."""
        bound_s = num_bytes / self._config.bytes_per_s if self._config.bytes_per_s else 0.0
        return max(bound_s, self._times.transfer_s(num_bytes))

    def _begin_last_stage(self, each: _Outgoing, now: float, effects: list[Effect]) -> None:
        """It stands still from here on."""
        request = each.request
        self.paused.add(request)
        if self._config.mode is MigrationMode.RECOMPUTE:
            self._memory.drop(request)
        if not request.is_started:
            self._ask_to_hand_over(each, now, effects)
            return
        each.is_last = True
        each.stage += 1 if each.num_told else 0
        self._offer(each, request.num_computed, now, effects)

    def _offer(self, each: _Outgoing, num_computed: int, now: float, effects: list[Effect]) -> None:
        """Offer a stage: blocks up to the one that ends, or holds, the ``num_computed``-th token."""
        request = each.request
        num_blocks = self._memory.blocks_for(num_computed)
        lie_in = request.host_blocks if request.is_swapped else request.blocks
        blocks = tuple(lie_in[each.num_offered : num_blocks])
        ticket = make_ticket(self._key, each.number, each.stage, blocks, on_host=request.is_swapped)
        if each.stage == 0:
            spec = request.spec_now()
            effects.append(
                Send(
                    each.to,
                    Offer(each.number, request.epoch, request.gateway, spec, num_computed, ticket, each.is_last),
                )
            )
        else:
            token_ids = tuple(request.token_ids[each.num_told :])
            effects.append(Send(each.to, Stage(each.number, token_ids, num_computed, ticket, each.is_last)))
        each.num_told = len(request.token_ids)
        each.num_offered = num_blocks
        each.phase = _Phase.COPYING
        each.began_s = now
        each.stage_bytes = self._memory.bytes_of_blocks(len(blocks))
        each.deadline_s = now + self._config.timeout_s + _PATIENCE * self._copy_s(each.stage_bytes)

    def _ask_to_hand_over(self, each: _Outgoing, now: float, effects: list[Effect]) -> None:
        request = each.request
        each.phase = _Phase.HANDING_OVER
        each.kv_bytes = self._memory.bytes_of(request)
        each.deadline_s = now + self._retry_s
        number = each.number if each.is_last else 0
        effects.append(
            Send(
                request.gateway,
                HandOver(
                    request.request_id,
                    request.epoch,
                    each.to,
                    number,
                    request.num_output,
                    self._policy.attained(request, now),
                ),
            )
        )

    def _stay(self, each: _Outgoing) -> None:
        """It is not moved, and goes on here."""
        self.num_failed += 1
        del self._outgoing[each.request.request_id]
        self.paused.discard(each.request)

    def _end_order(self, to: Peer) -> None:
        """Nobody more goes there: it has no room, wants none, or is not known. The coordinator will hear of it."""
        if self._order is not None and self._order.to == to:
            self._order = None

    def _withdraw(self, each: _Outgoing, effects: list[Effect]) -> None:
        if each.num_told:
            effects.append(Send(each.to, Withdrawn(each.number)))

    def _find(self, number: int, sender: Peer) -> _Outgoing | None:
        return next((each for each in self._outgoing.values() if each.number == number and each.to == sender), None)

"""The coordinator's state: the instances, and the requests that wait for one.

Soft: whatever it holds, workers and gateways tell it again after a restart.

Requests are bound late. While some instance can admit a request, it goes at once to the freest that can
(``core.placement.fleet``); else it waits here in a skip-join queue (``core.cluster.queue``), up to a bound; how long,
its gateway decides. Whenever room may have come, those who wait get it in their order, and one that fits nowhere now
lets those behind it pass. Short ones could so take for ever what comes free. Therefore a request that would be passed
after it has waited for its promotion has an instance kept for it, the one with the most room of those that could hold
it: nobody else is sent there, so its room grows until the request fits, there or anywhere else.

Each round it is looked at who should move requests to whom (``core.migration.pairing``), whether there should be more
instances or fewer (``core.cluster.scaling``), and who guards whose requests (``core.checkpoints.ring``).
"""

from collections.abc import Mapping

from actorserve.core.checkpoints.ring import CheckpointRing
from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.queue import MAX_RETRY_AFTER_S, ClusterQueue, WaitingRequest
from actorserve.core.cluster.scaling import Scaling
from actorserve.core.effects import Effect, Send
from actorserve.core.messages import (
    LOCAL,
    LoadReport,
    Message,
    Peer,
    PeerDown,
    PeerUp,
    Place,
    RefusalReason,
    Refused,
    Role,
    Speed,
    StartFailed,
    Tick,
    Unplace,
    WorkerInfo,
)
from actorserve.core.migration.pairing import Pairing
from actorserve.core.placement.baselines import ORDERS
from actorserve.core.placement.fleet import Fleet, InstanceView
from actorserve.core.timing.profile import Curve


class ClusterState:
    """The pure state machine of the coordinator."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.fleet = Fleet(
            config.max_queue_per_instance if config.late_binding else None,
            config.placement_ttl_s,
            report_ttl_s=config.report_ttl_s,
            order=ORDERS[config.dispatch],
            prefix_aware=config.prefix_aware,
        )
        self.pairing = None if config.migration is None else Pairing(config.migration, self.fleet)
        self.scaling = None if config.scaling is None else Scaling(config.scaling)
        self.checkpoint_ring = CheckpointRing() if config.checkpoints else None
        self.line = ClusterQueue(
            lambda priority: config.promote_after_s_of.get(priority, config.promote_after_s), config.min_share
        )
        self.num_stale_messages = 0
        self._speeds: dict[Peer, tuple[float, Curve]] = {}  # first quantum, prefill time by tokens
        self._fastest: tuple[float, Curve] | None = None
        self._next_round_s: float | None = None

    @property
    def instances(self) -> Mapping[Peer, InstanceView]:
        return self.fleet.views

    @property
    def waiting(self) -> Mapping[str, WaitingRequest]:
        """Who waits for an instance, by request id."""
        return self.line.waiting

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        """Take one message (local ones have no sender), and return what is to be done, in order."""
        sender = sender or LOCAL
        effects: list[Effect] = []
        self.fleet.expire_reports(now)
        match message:
            case Place():
                self._on_place(message, sender, now, effects)
            case LoadReport() if sender in self.instances:
                self._on_report(sender, message, now)
            case StartFailed() if self.scaling is not None:
                self.scaling.on_start_failed()
            case Unplace(request_id=request_id, epoch=epoch):
                self._forget(request_id, epoch, now)
            case PeerUp(peer=peer, role=Role.WORKER, worker=WorkerInfo(kind=kind, model=model, speed=speed)):
                self._on_instance_up(InstanceView(peer, kind, model), speed)
            case PeerUp():
                pass  # gateways make themselves known by what they ask
            case PeerDown(peer=peer):
                self._on_peer_down(peer, now)
            case Tick():
                self.fleet.expire(now)
                if self._next_round_s is not None and now >= self._next_round_s:
                    self._decide_round(now, effects)
            case _:
                self.num_stale_messages += 1
        if self._next_round_s is None and self._has_rounds():
            self._next_round_s = now + self.config.round_s
        self._dispatch_waiting(now, effects)
        return effects

    def next_deadline(self) -> float | None:
        """When to send the next Tick, in seconds on the shell's clock."""
        expiry_s = self.fleet.next_expiry_s()
        if self._next_round_s is None or not self._has_rounds():
            return expiry_s
        return self._next_round_s if expiry_s is None else min(expiry_s, self._next_round_s)

    # --- instances come and report, and rounds -----------------------------------------------------------------------

    def _on_instance_up(self, view: InstanceView, speed: Speed | None) -> None:
        if view.peer in self.instances and self.pairing is not None:
            self.pairing.on_down(view.peer)
        self.fleet.add(view)
        if self.scaling is not None:
            self.scaling.on_up(view.peer)
        self._learn_speed(view.peer, speed)

    def _on_report(self, peer: Peer, report: LoadReport, now: float) -> None:
        self.fleet.on_report(peer, report, now)
        if self.pairing is not None:
            self.pairing.on_report(self.instances[peer])
        if self.scaling is not None:
            self.scaling.on_report(peer, now)

    def _has_rounds(self) -> bool:
        """Whether there is anything that a round could decide."""
        has_pairs = self.pairing is not None or self.checkpoint_ring is not None
        return self.scaling is not None or (has_pairs and len(self.instances) > 1)

    def _decide_round(self, now: float, effects: list[Effect]) -> None:
        self._next_round_s = now + self.config.round_s if self._has_rounds() else None
        if self.scaling is not None:
            decided, leaving = self.scaling.round(self.instances.values(), len(self.line), self.line.num_tokens, now)
            effects += decided
            if leaving is not None:
                self.fleet.drain(leaving)
        if self.pairing is not None:
            self._keep_for_first(now)
            effects += self.pairing.round(now)
        if self.checkpoint_ring is not None:
            effects += self.checkpoint_ring.round(self.instances.values(), now)

    # --- requests come and go ----------------------------------------------------------------------------------------

    def _on_place(self, place: Place, gateway: Peer, now: float, effects: list[Effect]) -> None:
        placement = self.fleet.placement(place.request_id)
        waiting = self.waiting.get(place.request_id)
        known_epoch = placement.placed.epoch if placement else waiting.place.epoch if waiting else 0
        if place.epoch < known_epoch:
            self.num_stale_messages += 1
        elif placement is not None and place.epoch == known_epoch:
            effects.append(Send(gateway, placement.placed))  # asked again: the answer may have been lost
        elif waiting is not None and place.epoch == known_epoch:
            if place.avoid != waiting.place.avoid:
                # Asked again: it keeps its turn, though it may go elsewhere now.
                self.fleet.release(place.request_id)
                self.line.avoid(place.request_id, place.avoid)
        else:
            self._forget(place.request_id, place.epoch, now)
            self._dispatch_waiting(now, effects)  # what that may have freed is for those who wait already
            self._take(WaitingRequest(gateway, place, now), now, effects)

    def _take(self, waiting: WaitingRequest, now: float, effects: list[Effect]) -> None:
        """Dispatch a new request, have it wait, or refuse it.

        It overtakes nobody: for whoever waits there is no room now, or what there is is kept for others.
        """
        place, gateway = waiting.place, waiting.gateway
        if self.fleet.largest_tokens is not None and place.num_tokens > self.fleet.largest_tokens:
            self._refuse(waiting, RefusalReason.TOO_LARGE, self.config.retry_s, effects)
        elif (view := self.fleet.choose(place)) is not None:
            effects.append(Send(gateway, self.fleet.place(view, gateway, place, now)))
        elif len(self.line) >= self.config.max_waiting_requests:
            retry_after_s = min(max(self.config.retry_s, self.line.drain_s(now)), MAX_RETRY_AFTER_S)
            self._refuse(waiting, RefusalReason.OVERLOADED, retry_after_s, effects)
        else:
            first_priority = self.line.first_priority
            self.line.join(waiting, self._num_quanta(place.num_tokens), now)
            if self.line.first_priority != first_priority:
                for keeper in self.fleet.reserving_ids:
                    if not self.line.leads(keeper, now):
                        self.fleet.release(keeper)  # the more urgent class goes first

    def _refuse(
        self, waiting: WaitingRequest, reason: RefusalReason, retry_after_s: float, effects: list[Effect]
    ) -> None:
        refused = Refused(waiting.place.request_id, waiting.place.epoch, reason, retry_after_s)
        effects.append(Send(waiting.gateway, refused))

    def _forget(self, request_id: str, epoch: int, now: float) -> None:
        """Drop what is held for this request at this or an older epoch."""
        waiting = self.waiting.get(request_id)
        if waiting is not None and waiting.place.epoch <= epoch:
            self._remove_waiting(request_id, now)
        self.fleet.forget(request_id, epoch)

    def _remove_waiting(self, request_id: str, now: float) -> None:
        self.line.remove(request_id, now)
        self.fleet.release(request_id)

    def _on_peer_down(self, peer: Peer, now: float) -> None:
        if self.pairing is not None:
            self.pairing.on_down(peer)
        if self.scaling is not None:
            self.scaling.on_down(peer)
        self.fleet.remove(peer)
        speed = self._speeds.pop(peer, None)
        if speed is not None and speed is self._fastest:
            self._find_fastest()
        for request_id in [r for r, waiting in self.waiting.items() if waiting.gateway == peer]:
            self._remove_waiting(request_id, now)
        self.fleet.forget_gateway(peer)

    # --- who waits is dispatched -------------------------------------------------------------------------------------

    def _dispatch_waiting(self, now: float, effects: list[Effect]) -> None:
        """Give what room there is to those who wait, in their order.

        This costs nothing while even the shortest of them fits nowhere. Else it looks at few before somebody fits: at
        those whose promotion is not due yet, and at those that instances are kept for.
        """
        while self._is_room() and self._go_through_line(now, effects):
            pass

    def _go_through_line(self, now: float, effects: list[Effect]) -> bool:
        """From the front, until there is no room. True where that has to begin anew: the order or what is kept changed.

        Instances are kept for those who would be passed though they have waited long enough.
        """
        for request_id in self.line.order(now):
            waiting = self.waiting[request_id]
            has_reservation = self.fleet.has_reservation(request_id)
            view = self.fleet.choose(waiting.place)
            if view is not None:
                self.line.dispatch(request_id, now)
                placed = self.fleet.place(view, waiting.gateway, waiting.place, now, now - waiting.since_s)
                effects.append(Send(waiting.gateway, placed))
                if has_reservation or self.line.num_classes > 1:
                    return True
            elif not has_reservation and self.line.is_overdue(request_id, now) and self.line.leads(request_id, now):
                self.fleet.reserve_for(waiting.place)
            else:
                continue
            if not self._is_room():
                break
        return False

    def _keep_for_first(self, now: float) -> None:
        """Keep an instance for the first in the line once it is overdue, also where nobody could pass it.

        For what is kept for a request is where others are moved away, to make room for it.
        """
        request_id = next(iter(self.line.order(now)), None)
        if (
            request_id is not None
            and not self.fleet.has_reservation(request_id)
            and self.line.is_overdue(request_id, now)
        ):
            self.fleet.reserve_for(self.waiting[request_id].place)

    def _is_room(self) -> bool:
        """Whether there is room for the shortest of those who wait."""
        shortest_tokens = self.line.shortest_tokens()
        return shortest_tokens is not None and shortest_tokens <= self.fleet.room_tokens

    # --- how long a prefill takes ------------------------------------------------------------------------------------

    def _learn_speed(self, peer: Peer, speed: Speed | None) -> None:
        """A speed that makes no sense is none."""
        if speed is None:
            return
        try:
            self._speeds[peer] = known = speed.min_iteration_s, Curve(speed.prefill_tokens, speed.prefill_s)
        except ValueError:
            self.num_stale_messages += 1
            return
        if known[0] > 0.0 and (self._fastest is None or known[0] < self._fastest[0]):
            self._fastest = known

    def _find_fastest(self) -> None:
        quanta = ((quantum_s, peer) for peer, (quantum_s, _) in self._speeds.items() if quantum_s > 0.0)
        fastest = min(quanta, default=None)
        self._fastest = None if fastest is None else self._speeds[fastest[1]]

    def _num_quanta(self, num_tokens: int) -> float:
        """A request's prefill in first quanta, on the fastest instance; 0 while none has said how fast it is.

        The first quantum is the shortest iteration of that instance.
        """
        if self._fastest is None:
            return 0.0
        quantum_s, prefill_s = self._fastest
        return prefill_s(num_tokens) / quantum_s

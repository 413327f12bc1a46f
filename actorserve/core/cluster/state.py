"""The coordinator's state: the instances, and the requests that wait for one.

The state is soft: after a restart, workers and gateways tell the coordinator again all that it held. In a cluster with
several coordinators one of them serves, and the others stand by, with nothing in their state.

Requests are bound late. If some instance can admit a request, the request goes at once to the freest one that can
(``core.placement.dispatch``). Otherwise it waits here in a skip-join queue (``core.cluster.queue``) of bounded length;
its gateway decides for how long. Whenever room may have become free, waiting requests are dispatched in order, and a
request that fits nowhere now lets the requests behind it pass. Then short requests could take all free room for ever.
Therefore, if a request would be passed after it has waited for its promotion, an instance is reserved for it: the one
with the most room of those that could hold it. No other request is sent there, so its room grows until the request
fits, there or elsewhere. In a large fleet, the next round reserves an instance for the first waiting request, whether
or not it is overdue, and migration makes room there.

Each round decides which instances move requests to which (``core.migration.pairing``), which ones change their pool
(``core.pools.sizing``), whether an instance starts or ends (``core.cluster.scaling``), and which instance holds the
checkpoints of which (``core.checkpoints.ring``).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from actorserve.core.checkpoints.ring import CheckpointRing
from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.digests import LoadDigests
from actorserve.core.cluster.live_settings import LiveSettings
from actorserve.core.cluster.operators import Operators
from actorserve.core.cluster.power import ClusterPower
from actorserve.core.cluster.queue import MAX_RETRY_AFTER_S, ClusterQueue, WaitingRequest
from actorserve.core.cluster.scaling import Scaling
from actorserve.core.cluster.tables import state_of
from actorserve.core.effects import Effect, ReloadKeys, Send, StartWorker
from actorserve.core.messages import (
    LOCAL,
    ActsDone,
    Answer,
    Command,
    InstanceRole,
    LoadReport,
    Message,
    Orders,
    Outcome,
    Peer,
    PeerDown,
    PeerUp,
    Place,
    PowerReport,
    RefusalReason,
    Refused,
    Role,
    Serve,
    Speed,
    StandBy,
    StartFailed,
    Tick,
    Unplace,
    WorkerInfo,
)
from actorserve.core.migration.pairing import Pairing
from actorserve.core.operations.results import Results
from actorserve.core.placement.dispatch import Need, Reach
from actorserve.core.placement.fleet import Fleet
from actorserve.core.placement.instance_view import NewInstance
from actorserve.core.placement.rules import DISPATCH_RULES
from actorserve.core.pools.cluster_scheduler import ClusterScheduler, Pair
from actorserve.core.pools.pressure import PoolPressure
from actorserve.core.pools.sizing import PoolSizing
from actorserve.core.timing.speeds import InstanceSpeeds

_SHOWN_DIGITS: Final = 12  # of a kind, which is a hash


class ClusterState:
    """The pure state machine of the coordinator."""

    def __init__(self, config: ClusterConfig) -> None:
        self.term: Serve | None = None  # since the first peer came up
        self.standing_by: StandBy | None = None  # while another coordinator serves
        self._first_config = config
        self._results = Results()  # of operators' acts, which stay done when another coordinator serves
        self._begin(config)

    def _begin(self, config: ClusterConfig) -> None:
        """Begin with an empty state."""
        self.config = config
        self.fleet = Fleet(
            config.max_queue_per_instance if config.late_binding else None,
            config.placement_ttl_s,
            report_ttl_s=config.report_ttl_s,
            rule=DISPATCH_RULES[config.dispatch],
            prefix_aware=config.prefix_aware,
        )
        self.scheduler = ClusterScheduler(config.pools, self.fleet)
        self._speeds = InstanceSpeeds()
        self.pressure = PoolPressure(config.pools, self._speeds)
        self.sizing = PoolSizing(self.fleet, self._speeds, self.pressure) if config.pools.follow_load else None
        across_kinds = config.pools.across_kinds
        self.pairing = None
        if config.migration is not None:
            self.pairing = Pairing(config.migration, self.fleet, across_kinds=across_kinds)
        self.scaling = None if config.scaling is None else Scaling(config.scaling, self.pressure)
        self.checkpoint_ring = CheckpointRing() if config.checkpoints else None
        self.queue = ClusterQueue(
            lambda priority: config.promote_after_s_of.get(priority, config.promote_after_s), config.min_share
        )
        self.num_stale_messages = 0
        live = LiveSettings(lambda: self.config, self._set_config, self.pairing, self.scaling)
        moves = self.pairing is not None
        self.operators = Operators(self.fleet, self._status, live.handlers, self._results, moves=moves)
        self.power = ClusterPower(config.power, self.fleet, self.operators.events)
        self.operators.add(self.power.handlers)
        self._digests = LoadDigests(config.digest_s)
        self._next_round_s: float | None = None

    @property
    def waiting(self) -> Mapping[str, WaitingRequest]:
        """The requests that wait for an instance, by request id."""
        return self.queue.waiting

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        """Take one message (local ones have no sender), and return the effects, in order."""
        sender = sender or LOCAL
        effects: list[Effect] = []
        if isinstance(message, StandBy):
            self.standing_by, self.term = message, None
            self._begin(self._first_config)
        elif isinstance(message, Serve):
            self.standing_by, self.term = None, message
            self.operators.name, self.operators.lasting.term = message.name, message.term
            self.operators.events.add(now, "serves", message.name, f"it serves the cluster, in term {message.term}")
            effects.append(ReloadKeys())  # an operator's order to read them again reaches no standby
            return effects
        if self.standing_by is not None:
            return self._stand_by(self.standing_by, message, sender)
        self.fleet.expire_reports(now)
        match message:
            case Place():
                self._on_place(message, sender, now, effects)
            case LoadReport() if sender in self.fleet.instances:
                self._on_report(sender, message, now, effects)
            case StartFailed() if self.scaling is not None:
                self.scaling.on_start_failed()
            case Unplace(request_id=request_id, epoch=epoch):
                self._forget(request_id, epoch, now)
            case Command() if sender not in self.fleet.instances and sender not in self.operators.gateways:
                effects += self.operators.on_command(message, sender, now)
            case Answer() if (answered := self.operators.on_answer(message, sender, now)) is not None:
                effects += answered
            case ActsDone():
                self.operators.on_acts_done(message)
            case Orders() if sender in self.fleet.instances or sender in self.operators.gateways:
                effects += self.operators.lasting.on_told(message, sender, now)
            case PeerUp(peer=peer, role=Role.WORKER, worker=WorkerInfo(kind=kind, model=model, speed=speed)):
                self._on_instance_up(NewInstance(peer, kind, model), speed)
                self.operators.events.add(now, "up", peer.name, f"model {model.name}, kind {kind[:_SHOWN_DIGITS]}")
                effects += self.operators.lasting.on_up(peer, now)
            case PeerUp(peer=peer, role=Role.GATEWAY):
                self.operators.gateways[peer] = None
                self.operators.events.add(now, "up", peer.name)
                effects += self._digests.on_up(peer, self.fleet.views.values(), now)
                effects += self.operators.lasting.on_up(peer, now)
            case PeerUp(peer=peer, role=Role.POWER):
                self.power.on_up(peer)
                self.operators.events.add(now, "up", peer.name)
                effects += self.operators.lasting.on_host_up(now)
            case PowerReport() if self.power.on_report(sender, message, now):
                pass
            case PeerUp():
                pass  # another coordinator
            case PeerDown(peer=peer):
                self._on_peer_down(peer, now)
                self.operators.events.add(now, "down", peer.name)
                effects += self.operators.on_down(peer, now)
            case Tick():
                self.fleet.expire(now)
                effects += self.operators.on_tick(now)
                effects += self._digests.on_tick(self.fleet.views.values(), now)
                effects += self.power.on_tick(now)
                if self._next_round_s is not None and now >= self._next_round_s:
                    self._decide_round(now, effects)
            case _:
                self.num_stale_messages += 1
        if self._next_round_s is None and self._has_rounds():
            self._next_round_s = now + self.config.round_s
        self._dispatch_waiting(now, effects)
        return effects

    @property
    def settings_set(self) -> Mapping[str, str]:
        """What operators have set, by the settings' names."""
        return self.operators.lasting.settings

    def next_deadline(self) -> float | None:
        """When to send the next Tick, in seconds on the shell's clock."""
        if self.standing_by is not None:
            return None
        round_s = self._next_round_s if self._has_rounds() else None
        known = (self.fleet.next_expiry_s(), self._digests.next_s, round_s, self.operators.next_deadline())
        deadlines = (*known, self.power.next_s)
        return min([deadline_s for deadline_s in deadlines if deadline_s is not None], default=None)

    def validate(self) -> None:
        """For tests, after each event. Raises: AssertionError with the invariant that does not hold."""
        self.fleet.validate()
        self.scheduler.validate()
        self.queue.validate()
        if self.pairing is not None:
            self.pairing.validate()
        if self.scaling is not None:
            self.scaling.validate()
        self.operators.orders.validate()
        self.power.governor.validate()
        for request_id in self.queue.waiting:
            assert self.fleet.placement(request_id) is None, f"{request_id} waits, so it is not placed as well"
        for request_id in self.fleet.reserving_ids:
            assert request_id in self.waiting, f"an instance is reserved for {request_id}, so it waits"
        for view in self.fleet.views.values():
            if view.reserved_for is not None:
                place = self.waiting[view.reserved_for.request_id].place
                assert view.reserved_for == place, f"{view.peer.name} is reserved for what waits"

    def _stand_by(self, standing_by: StandBy, message: Message, sender: Peer) -> list[Effect]:
        """Another coordinator serves, and operators are told which."""
        if isinstance(message, ActsDone):
            self.operators.on_acts_done(message)
        if not isinstance(message, Command):
            return []
        why = "no coordinator serves now"
        if standing_by.serving:
            why = f"this is a standby: {standing_by.serving} serves, in term {standing_by.term}"
        return [Send(sender, Answer(message.command_id, Outcome.STANDBY, why))]

    # --- instances come and report, and rounds -----------------------------------------------------------------------

    def _on_instance_up(self, instance: NewInstance, speed: Speed | None) -> None:
        if instance.peer in self.fleet.instances and self.pairing is not None:
            self.pairing.on_down(instance.peer)
        self.operators.orders.on_up(instance.peer)
        self.scheduler.on_down(instance.peer)
        self.fleet.add(instance)
        if self.scaling is not None:
            self.scaling.on_up(instance.peer)
        if speed is not None:
            try:
                self._speeds.learn(instance.peer, speed)
            except ValueError:
                self.num_stale_messages += 1

    def _on_report(self, peer: Peer, report: LoadReport, now: float, effects: list[Effect]) -> None:
        view = self.fleet.on_report(peer, report, now)
        effects += self.operators.orders.on_report(view)
        self.scheduler.on_report(view, now)
        if self.pairing is not None:
            self.pairing.on_report(view)
        role = None if self.scaling is None else self.scaling.on_report(peer, now)
        if role is not None and role is not view.role:
            effects += self.operators.orders.assign(view, role)
            self.operators.events.add(now, "role", peer.name, f"{role}, because it was started for that pool")

    def _has_rounds(self) -> bool:
        """Whether there is anything that a round could decide."""
        has_pairs = self.pairing is not None or self.checkpoint_ring is not None
        has_several = has_pairs or self.sizing is not None
        return self.scaling is not None or (has_several and len(self.fleet.instances) > 1)

    def _decide_round(self, now: float, effects: list[Effect]) -> None:
        self._next_round_s = now + self.config.round_s if self._has_rounds() else None
        if self.scaling is not None:
            instances = self.fleet.instances.values()
            decided, terminating = self.scaling.round(instances, len(self.queue), self.queue.num_tokens, now)
            effects += decided
            for effect in decided:
                if isinstance(effect, StartWorker):
                    self.operators.events.add(now, "scale", "cluster", _start_text(effect.role))
            if terminating is not None:
                text = "it is not needed now, and ends"
                if self.fleet.has_roles:
                    text = f"it is not needed now in the {terminating.role} pool, and ends"
                self.fleet.drain(terminating)
                self.operators.events.add(now, "scale", terminating.peer.name, text)
        if self.sizing is not None:
            fixed = self.operators.orders.with_roles
            for view, role in self.sizing.round(now, self.queue.num_tokens, fixed):
                effects += self.operators.orders.assign(view, role)
                self.operators.events.add(now, "role", view.peer.name, f"{role}, because that pool is more pressed")
        if self.pairing is not None:
            self._reserve_for_first(now)
            orders = self.pairing.round(now)
            self.operators.note_moves(orders, now)
            effects += orders
        if self.checkpoint_ring is not None:
            effects += self.checkpoint_ring.round(self.fleet.views.values(), now)

    def _set_config(self, config: ClusterConfig) -> None:
        self.config = config

    def _status(self) -> list[tuple[str, object]]:
        """The cluster in a few lines."""
        instances, queue = self.fleet.instances.values(), self.queue
        reports = [view.report for view in self.fleet.views.values()]
        states = Counter(map(state_of, instances))
        used_bytes = sum(report.kv_used_bytes for report in reports)
        total_bytes = sum(report.kv_total_bytes for report in reports)
        return [
            ("coordinator", self.operators.name),
            ("term", 0 if self.term is None else self.term.term),
            ("workers", len(instances)),
            *((f"workers {state}", count) for state, count in sorted(states.items())),
            ("gateways", len(self.operators.gateways)),
            ("models", ", ".join(sorted({instance.model.name for instance in instances}))),
            ("kinds of workers", len({instance.kind for instance in instances})),
            ("requests waiting in the cluster", len(queue)),
            ("requests running", sum(report.num_running for report in reports)),
            ("requests waiting on workers", sum(report.num_waiting for report in reports)),
            ("KV used", f"{used_bytes / max(1, total_bytes):.0%} of {total_bytes / 2**20:.0f} MiB"),
            ("moves between workers", "off" if self.pairing is None else len(self.pairing.moves)),
            ("workers starting", "not scaled" if self.scaling is None else self.scaling.num_starting),
            *self.power.status(),
            ("stale messages", self.num_stale_messages),
        ]

    # --- requests come and go ----------------------------------------------------------------------------------------

    def _on_place(self, place: Place, gateway: Peer, now: float, effects: list[Effect]) -> None:
        if self.config.pools.across_kinds and place.kind:
            place = replace(place, kind="")
        placement = self.fleet.placement(place.request_id)
        waiting = self.waiting.get(place.request_id)
        known_epoch = placement.placed.epoch if placement else waiting.place.epoch if waiting else 0
        if place.epoch < known_epoch:
            self.num_stale_messages += 1
        elif placement is not None and place.epoch == known_epoch:
            placed = placement.placed
            if placed.token_instance not in self.fleet.instances:
                placed = replace(placed, token_instance=None)  # it has gone since
            effects.append(Send(gateway, placed))  # answer again, because the first answer may have been lost
        elif waiting is not None and place.epoch == known_epoch:
            if place.avoid != waiting.place.avoid:
                # The gateway asks again, with another instance to avoid. The request keeps its turn in the queue.
                self.fleet.release(place.request_id)
                self.queue.avoid(place.request_id, place.avoid)
        else:
            if placement is not None and self._follows_load:
                view = self.fleet.views[placement.placed.instance]
                self.pressure.on_refused(view, placement.num_tokens, now)
            self._forget(place.request_id, place.epoch, now)
            # Waiting requests go first for the room that this may have freed, and instances are reserved for those that
            # the new request would pass though they have waited long enough.
            self._dispatch_waiting(now, effects, place)
            self._dispatch_or_queue(WaitingRequest(gateway, place, now), now, effects)

    def _dispatch_or_queue(self, waiting: WaitingRequest, now: float, effects: list[Effect]) -> None:
        """Dispatch a new request, let it wait, or refuse it.

        It overtakes no waiting request, because these have no room now, or their room is reserved for others.
        """
        place = waiting.place
        if self.fleet.largest_tokens is not None and place.num_tokens > self.fleet.largest_tokens:
            self._refuse(waiting, RefusalReason.TOO_LARGE, self.config.retry_s, effects)
        elif (pair := self._choose(place, now)) is not None:
            self._place(waiting, pair, now, effects)
        elif len(self.queue) >= self.config.max_waiting_requests:
            retry_after_s = min(max(self.config.retry_s, self.queue.drain_s(now)), MAX_RETRY_AFTER_S)
            self._refuse(waiting, RefusalReason.OVERLOADED, retry_after_s, effects)
        else:
            first_priority = self.queue.first_priority
            self.queue.join(waiting, self._speeds.num_quanta(place.num_tokens), now)
            if self.queue.first_priority != first_priority:
                for request_id in self.fleet.reserving_ids:
                    if not self.queue.leads(request_id, now):
                        self.fleet.release(request_id)  # the more urgent class goes first

    def _choose(self, place: Place, now: float) -> Pair | None:
        """The instances for a request; None if it is to wait."""
        num_waiting_tokens = self.queue.num_tokens if self.config.late_binding else None
        return self.scheduler.choose(place, now, num_waiting_tokens=num_waiting_tokens)

    def _place(self, waiting: WaitingRequest, pair: Pair, now: float, effects: list[Effect]) -> None:
        place, waited_s = waiting.place, now - waiting.since_s
        placed = self.fleet.place(pair.prompt, waiting.gateway, place, now, waited_s, pair.token)
        effects.append(Send(waiting.gateway, placed))
        if self._follows_load:
            self.pressure.on_place(pair.prompt, place.num_tokens, now)

    @property
    def _follows_load(self) -> bool:
        """Whether anything follows the pressure on the pools."""
        return self.sizing is not None or self.scaling is not None

    def _refuse(
        self, waiting: WaitingRequest, reason: RefusalReason, retry_after_s: float, effects: list[Effect]
    ) -> None:
        refused = Refused(waiting.place.request_id, waiting.place.epoch, reason, retry_after_s)
        effects.append(Send(waiting.gateway, refused))

    def _forget(self, request_id: str, epoch: int, now: float) -> None:
        """Forget the request's place in the queue and its placement, at this or an older epoch."""
        waiting = self.waiting.get(request_id)
        if waiting is not None and waiting.place.epoch <= epoch:
            self._remove_waiting(request_id, now)
        self.fleet.forget(request_id, epoch)

    def _remove_waiting(self, request_id: str, now: float) -> None:
        self.queue.remove(request_id, now)
        self.fleet.release(request_id)

    def _on_peer_down(self, peer: Peer, now: float) -> None:
        if self.pairing is not None:
            self.pairing.on_down(peer)
        if self.scaling is not None:
            self.scaling.on_down(peer)
        self.power.on_down(peer)
        self.fleet.remove(peer)
        self.scheduler.on_down(peer)
        self._speeds.forget(peer)
        self._digests.on_down(peer)
        for request_id in [r for r, waiting in self.waiting.items() if waiting.gateway == peer]:
            self._remove_waiting(request_id, now)
        self.fleet.forget_gateway(peer)

    # --- waiting requests are dispatched -----------------------------------------------------------------------------

    def _dispatch_waiting(self, now: float, effects: list[Effect], new: Place | None = None) -> None:
        """Dispatch waiting requests, in their order, as far as there is room, for them or for a ``new`` request.

        This costs little while no instance admits a request, because room is compared by what requests need and not
        by request. Otherwise it passes few requests before one fits: those whose promotion is not due yet, and those
        that instances are reserved for. What those need is looked for once.
        """
        while self._has_room(new) and self._walk_queue(now, effects, new):
            pass

    def _walk_queue(self, now: float, effects: list[Effect], new: Place | None) -> bool:
        """Dispatch from the front until there is no room. True if the order or the reservations changed: walk again.

        An instance is reserved for each request that would be passed though it has waited long enough.
        """
        # No instance admits so many tokens or more, and no instance is left to reserve for them.
        unplaced: dict[Reach, int] = {}
        unreserved: dict[Reach, int] = {}
        for request_id in self.queue.order(now):
            waiting = self.waiting[request_id]
            reach, num_tokens = self.fleet.reach_of(waiting.place), waiting.place.num_tokens
            has_reservation = self.fleet.has_reservation(request_id)
            pair = None
            if has_reservation or reach not in unplaced or num_tokens < unplaced[reach]:
                pair = self._choose(waiting.place, now)
            if pair is not None:
                self.queue.dispatch(request_id, now)
                self._place(waiting, pair, now, effects)
                if has_reservation or self.queue.num_classes > 1:
                    return True
            elif has_reservation:
                continue
            else:
                unplaced[reach] = min(num_tokens, unplaced.get(reach, num_tokens))
                if reach in unreserved and num_tokens >= unreserved[reach]:
                    continue
                if not self.queue.is_overdue(request_id, now) or not self.queue.leads(request_id, now):
                    continue
                if not self.fleet.reserve_for(waiting.place, is_overdue=True):
                    unreserved[reach] = num_tokens
                    continue
            if not self._has_room(new):
                break
        return False

    def _reserve_for_first(self, now: float) -> None:
        """Reserve an instance for the first waiting request, even if no request could pass it.

        Migration then moves other requests away from that instance, to make room for it.
        """
        request_id = next(iter(self.queue.order(now)), None)
        if request_id is not None and not self.fleet.has_reservation(request_id):
            self.fleet.reserve_for(self.waiting[request_id].place, is_overdue=self.queue.is_overdue(request_id, now))

    def _has_room(self, new: Place | None) -> bool:
        """Whether there is room for the ``new`` request, or for the shortest of the waiting ones with some need."""
        if not self.waiting:
            return False
        drafts = self.fleet.has_roles and self.scheduler.drafts_for_all(self.queue.num_tokens)
        if new is not None and self.fleet.admits_any(Need(new.kind, new.avoid), (new.num_tokens,), drafts=drafts):
            return True
        return any(self.fleet.admits_any(need, sizes, drafts=drafts) for need, sizes in self.queue.sizes.items())


def _start_text(role: InstanceRole | None) -> str:
    """What operators read about a start."""
    if role is None:
        return "one more worker is started"
    return f"one more worker is started for the {role} pool, because that pool is more pressed"

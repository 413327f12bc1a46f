"""The fleet: what is known of all instances, and the counts that dispatch relies on.

It keeps the views of the instances, the placements in flight, the reservations and the index in step. The rule itself
is in ``core.placement.dispatch``. An instance that is terminating or cordoned, or has not reported for a while, gets no
requests, however busy the others are.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import inf

from actorserve.core.messages import Cordon, InstanceRole, LoadReport, Peer, Place, Placed
from actorserve.core.placement.dispatch import (
    DispatchRule,
    HighestFreeness,
    Need,
    Reach,
    admits_any,
    best_admitting,
    dispatch,
    instance_to_wait_at,
    reach_of,
    required_kind,
)
from actorserve.core.placement.handoffs import HandoffsInFlight
from actorserve.core.placement.index import InstanceIndex
from actorserve.core.placement.instance_view import NO_ROOM, InstanceView, NewInstance, PlacementInFlight
from actorserve.core.placement.placements import PlacementsInFlight
from actorserve.core.placement.prefix_map import PrefixMap
from actorserve.core.placement.reservations import Reservations
from actorserve.core.placement.shortest_queue import ShortestQueue

HIGHEST_FREENESS = HighestFreeness()
_SHORTEST_QUEUE = ShortestQueue()


class Fleet:
    """All instances, and the requests that were sent to them and are in no report yet.

    ``max_queue`` bounds how many requests may wait at an instance for their turn. If it is None, a request that no
    instance has room for goes at once to one that could ever hold it, and waits there for room. An unconfirmed
    placement counts for ``placement_ttl_s`` seconds, and a report counts for ``report_ttl_s`` seconds. Without
    ``prefix_aware`` prompt prefixes do not count.
    """

    def __init__(
        self,
        max_queue: int | None,
        placement_ttl_s: float,
        *,
        report_ttl_s: float = inf,
        rule: DispatchRule = HIGHEST_FREENESS,
        prefix_aware: bool = True,
    ) -> None:
        self.instances: dict[Peer, NewInstance | InstanceView] = {}  # in the order in which they came up
        self.largest_tokens: int | None = None  # the longest request that any instance can ever hold; None without any
        self.prefixes = PrefixMap()
        self._max_queue = max_queue
        self._report_ttl_s = report_ttl_s
        self._may_wait_for_room = max_queue is None
        self._rule = rule
        self._counts_prefixes = prefix_aware and rule.counts_prefixes
        self._num_turns = 0
        self._reported_s: OrderedDict[Peer, float] = OrderedDict()  # of the instances not stale, the oldest first
        self._placements = PlacementsInFlight(placement_ttl_s)
        self._handoffs = HandoffsInFlight()
        self._reservations = Reservations()
        self._index = InstanceIndex()

    @property
    def views(self) -> Mapping[Peer, InstanceView]:
        """The instances that have reported, in the order in which they came up."""
        return {peer: view for peer, view in self.instances.items() if isinstance(view, InstanceView)}

    # --- instances come, report, and go ------------------------------------------------------------------------------

    def add(self, instance: NewInstance) -> None:
        """An instance has come up. It replaces one of the same name and incarnation."""
        self.remove(instance.peer)
        self.instances[instance.peer] = instance
        self.largest_tokens = max(self.largest_tokens or 0, instance.model.max_tokens)

    def remove(self, peer: Peer) -> None:
        """Forget an instance and the placements in flight to it. Unknown ones are ignored."""
        instance = self.instances.pop(peer, None)
        if instance is None:
            return
        if instance.model.max_tokens == self.largest_tokens:
            self.largest_tokens = max((known.model.max_tokens for known in self.instances.values()), default=None)
        if isinstance(instance, InstanceView):
            self._placements.drop_instance(instance)
            self._handoffs.drop_instance(instance)
            self._reservations.release_instance(instance)
            self._reported_s.pop(peer, None)
            self.prefixes.forget(peer)
            self._index.remove(instance)

    def on_report(self, peer: Peer, report: LoadReport, now: float) -> InstanceView:
        """Take a newer report of a known instance, and stop counting the placements that it confirms.

        An older report changes nothing.
        """
        view = self.instances[peer]
        if isinstance(view, NewInstance):
            self.instances[peer] = view = InstanceView(peer, view.kind, view.model, report)
            self._index.add(view)
            self._release_astray()
        elif report.sequence <= view.report.sequence:
            return view
        view.report, view.is_stale = report, False
        if report.cordon is view.cordon_ordered:
            view.cordon_ordered = None
        if report.role is view.role_ordered:
            view.role_ordered = None
        self._reported_s[peer] = now
        self._reported_s.move_to_end(peer)
        self._placements.confirm(view, report.accepted)
        for left in self._handoffs.confirm(view, report.accepted):
            self._recount(left)
        if view.reserved_for is not None and not view.can_hold(view.reserved_for):
            self._reservations.release_instance(view)
        self._update(view)
        return view

    def expire_reports(self, now: float) -> None:
        """An instance that was silent for too long gets no requests until it reports again."""
        while self._reported_s:
            peer, reported_s = next(iter(self._reported_s.items()))
            if now < reported_s + self._report_ttl_s:
                return
            del self._reported_s[peer]
            view = self._index.views[peer]
            view.is_stale = True
            self._reservations.release_instance(view)
            self._update(view)

    def drain(self, view: InstanceView) -> None:
        """The instance was told to terminate; no request is sent there any more."""
        view.told_to_drain = True
        self._reservations.release_instance(view)
        self._update(view)

    def cordon(self, view: InstanceView, cordon: Cordon) -> None:
        """An operator ordered this. It counts at once, before a report shows it."""
        is_shown = cordon is view.report.cordon and view.cordon_ordered is None  # and no other order is on its way
        view.cordon_ordered = None if is_shown else cordon
        if view.is_closed:
            self._reservations.release_instance(view)
        self._update(view)

    def set_role(self, view: InstanceView, role: InstanceRole) -> None:
        """An operator ordered this. It counts at once, before a report shows it."""
        is_shown = role is view.report.role and view.role_ordered is None  # and no other order is on its way
        view.role_ordered = None if is_shown else role
        self._update(view)

    def draft(self, view: InstanceView, *, is_drafted: bool) -> None:
        """Have the instance work in the mixed pool from now on, or in its own pool again."""
        view.is_drafted = is_drafted
        self._update(view)

    @property
    def has_roles(self) -> bool:
        """Whether any instance computes only one of the phases."""
        return self._index.has_roles

    def num_open(self, pool: InstanceRole) -> int:
        """How many instances of the pool may get requests."""
        return sum([group.num_awaited(1, None) for group in self._index.of_kind(None, pool)])

    def num_awaited(self, place: Place, pool: InstanceRole) -> int:
        """How many instances of the pool the request may wait for: they report, and could hold it if empty."""
        groups = self._index.of_kind(required_kind(place, self._index), pool)
        return sum([group.num_awaited(place.num_tokens, place.avoid) for group in groups])

    def reach_of(self, place: Place) -> Reach:
        """Which instances the request may get now."""
        return reach_of(place, self._index)

    def promise(self, view: InstanceView, num_bytes: int) -> None:
        """Expect ``num_bytes`` more (fewer if negative) by migration. No effect for an instance that is gone."""
        view.promised_bytes += num_bytes
        if self.instances.get(view.peer) is view:
            self._recount(view)

    @property
    def reported_s(self) -> Mapping[Peer, float]:
        """When the instances that are not stale reported last, in seconds on the shell's clock."""
        return self._reported_s

    # --- finding an instance -----------------------------------------------------------------------------------------

    @property
    def room_tokens(self) -> int:
        """The longest request that any instance admits now."""
        return self._index.max_admitted_tokens()

    def admits_any(self, need: Need, sizes: Sequence[int], *, drafts: bool = False) -> bool:
        """Whether an instance has room for one of the requests with this need, of ``sizes`` tokens, the least first.

        Token instances count only for requests that no other instance could ever hold, or if requests are started
        there, too, because it ``drafts`` them.
        """
        if self._may_wait_for_room:
            return sizes[0] <= self._index.max_capacity_tokens(None, need.avoid)
        return admits_any(need, sizes, self._index, drafts=drafts)

    def choose(
        self, place: Place, seed: int | None = None, pool: InstanceRole = InstanceRole.MIXED
    ) -> InstanceView | None:
        """The best instance of ``pool`` that admits the request now, or the better of two drawn ones if there is a
        ``seed``; None if no instance does.
        """
        prefixes = self.prefixes if self._counts_prefixes else None
        view = dispatch(place, self._index, self._rule_of(pool), prefixes, seed, pool)
        return instance_to_wait_at(place, self._index, pool) if view is None and self._may_wait_for_room else view

    def choose_to_decode(
        self, place: Place, kind: str | None, pool: InstanceRole, seed: int | None = None
    ) -> InstanceView | None:
        """The best instance of ``pool`` and ``kind`` (None: of any) with room for the KV of a request, which another
        instance computes, or the better of two drawn ones if there is a ``seed``; None without any.
        """
        return best_admitting(place, kind, self._index, seed, pool)

    def reserve_for(self, place: Place, *, is_overdue: bool) -> bool:
        """Reserve the instance with the most room of those that could hold the request.

        The reservation lasts until the request is placed, it is ``release``d, or the instance can no longer hold the
        request. False if no instance may be reserved (``core.placement.reservations``).
        """
        view = self._reservations.instance_for(place, self._index, is_overdue=is_overdue)
        if view is None:
            return False
        self._reservations.add(view, place)
        self._recount(view)
        return True

    def release(self, request_id: str) -> None:
        """Open the instance that was reserved for this request to all requests."""
        view = self._reservations.release(request_id)
        if view is not None:
            self._recount(view)

    def has_reservation(self, request_id: str) -> bool:
        return request_id in self._reservations

    @property
    def reserving_ids(self) -> list[str]:
        """The ids of the requests that instances are reserved for."""
        return self._reservations.request_ids

    # --- placements in flight ----------------------------------------------------------------------------------------

    def place(
        self,
        view: InstanceView,
        gateway: Peer,
        place: Place,
        now: float,
        waited_s: float = 0.0,
        token_view: InstanceView | None = None,
    ) -> Placed:
        """Count the request as sent to this instance, and to no other. If there is a ``token_view``, memory for the
        request's KV counts as reserved there from now on.
        """
        self._forget(place.request_id)
        self.release(place.request_id)
        token_instance = None if token_view is None else token_view.peer
        placed = Placed(place.request_id, place.epoch, view.peer, waited_s, token_instance)
        self._placements.add(view, gateway, placed, place.num_tokens, now)
        if token_view is not None:
            self._handoffs.add(token_view, place.request_id, place.epoch, gateway, place.num_tokens, now)
            self._recount(token_view)
        self._num_turns += 1
        view.last_turn = self._num_turns
        if place.prefix_names and self._counts_prefixes:
            self.prefixes.learn(view.peer, place.prefix_names, view.pool_tokens)
        self._recount(view)
        return placed

    def placement(self, request_id: str) -> PlacementInFlight | None:
        return self._placements.get(request_id)

    def forget(self, request_id: str, epoch: int) -> None:
        """Stop counting the request at this or an older epoch. Unknown ids are ignored."""
        placement = self._placements.get(request_id)
        if placement is not None and placement.placed.epoch <= epoch:
            self._forget(request_id)
        elif (handoff_epoch := self._handoffs.epoch_of(request_id)) is not None and handoff_epoch <= epoch:
            self._forget_handoff(request_id)

    def forget_gateway(self, gateway: Peer) -> None:
        """Stop counting the requests of a gateway that is gone."""
        for request_id in (*self._placements.of_gateway(gateway), *self._handoffs.of_gateway(gateway)):
            self._forget(request_id)

    def expire(self, now: float) -> None:
        """Stop counting placements and handoffs that no report has confirmed in time."""
        while (request_id := self._placements.first_expired(now)) is not None:
            view = self._placements.drop(request_id)
            if view is not None:
                self._recount(view)
        while (request_id := self._handoffs.first_expired(now)) is not None:
            self._forget_handoff(request_id)

    def next_expiry_s(self) -> float | None:
        expiries_s = self._placements.next_expiry_s(), self._handoffs.next_expiry_s()
        return min([expiry_s for expiry_s in expiries_s if expiry_s is not None], default=None)

    def _forget(self, request_id: str) -> None:
        view = self._placements.drop(request_id)
        if view is not None:
            self._recount(view)
        self._forget_handoff(request_id)

    def _forget_handoff(self, request_id: str) -> None:
        view = self._handoffs.drop(request_id)
        if view is not None:
            self._recount(view)

    # --- the index ---------------------------------------------------------------------------------------------------

    def _update(self, view: InstanceView) -> None:
        """Update the instance in the index after a report or an order."""
        has_changed = self._index.regroup(view)
        self._recount(view)
        if has_changed:
            self._release_astray()

    def _release_astray(self) -> None:
        for released in self._reservations.release_astray(self._index):
            self._recount(released)

    def _recount(self, view: InstanceView) -> None:
        """Update the instance's score and room in the index after what is sent there has changed. Its capacity and pool
        have not, and each placement saves the time to look.
        """
        self._index.update(view, self._rule_of(view.pool).score(view), self._admitted_tokens(view))

    def _rule_of(self, pool: InstanceRole) -> DispatchRule:
        """What instances of the pool are compared by: prompts join the shortest queue (Splitwise, section 4.2)."""
        return _SHORTEST_QUEUE if pool is InstanceRole.PROMPT else self._rule

    def _admitted_tokens(self, view: InstanceView) -> int:
        """The longest request that may be placed there: none while the reserved room is not yet large enough."""
        if self._may_wait_for_room and not self._rule.prefers_room:
            return view.capacity_tokens if view.is_healthy else NO_ROOM
        room_tokens = view.room_tokens(self._max_queue)
        if view.reserved_for is not None and room_tokens < view.reserved_for.num_tokens:
            return NO_ROOM
        return room_tokens

    def validate(self) -> None:
        """Raises: AssertionError if the index, the accounts and the views do not agree."""
        views = self.views
        assert all(peer == instance.peer for peer, instance in self.instances.items()), "instances are keyed by peer"
        largest_tokens = max((instance.model.max_tokens for instance in self.instances.values()), default=None)
        assert self.largest_tokens == largest_tokens, "largest_tokens is that of the largest instance"
        self._placements.validate(views.values())
        self._handoffs.validate(views.values())
        self._reservations.validate(views.values())
        self._index.validate()
        assert self._index.views == views, "the index holds the instances that have reported"
        for peer, view in views.items():
            assert self._index.views[peer] is view, f"the index holds the view of {peer.name}"
            score = self._rule_of(view.pool).score(view)
            assert view.score == score, f"the score of {peer.name} is up to date"
            assert view.admitted_tokens == self._admitted_tokens(view), f"the room of {peer.name} is up to date"
            assert (peer in self._reported_s) != view.is_stale, f"{peer.name} is stale once its report has expired"
            assert view.promised_bytes >= 0, f"no negative bytes are promised to {peer.name}"
        assert self._reported_s.keys() <= views.keys(), "only known instances have reported"

"""Dispatch: which instance a request goes to (Llumnix, section 4.4.3: to the highest freeness).

A request goes only where it can be admitted: where its blocks fit beside the KV of all started requests, in device and
host pool together, and the queue is under a bound. The load reports that a dispatcher acts on are always a little old,
and the usual error of such dispatchers is to send a burst of requests to whoever looked free a moment ago. So each
``InstanceView`` carries its own account of what was placed there and is not yet in a report: it counts as if it ran
already where freeness is asked for, and as waiting where room is. What migrations are to bring counts likewise, until
reports show it. What they are to take away counts where it is until it is gone: a source with few requests would look
like the freest of all, and draw new ones.

An instance that holds the beginning of a request's prompt (``core.placement.prefix_map``) is freer by the KV that this
saves. To one that terminates, or has not reported for a while, nothing goes, however busy the others are.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from operator import itemgetter

from actorserve.core.kv.block_allocator import blocks_for
from actorserve.core.messages import LoadReport, ModelInfo, Peer, Place, Placed
from actorserve.core.placement.freeness import freeness
from actorserve.core.placement.prefix_map import PrefixMap

NO_ROOM = -1


@dataclass(frozen=True, slots=True)
class PlacementInFlight:
    """A placement that no load report has confirmed yet."""

    gateway: Peer
    placed: Placed
    num_blocks: int
    expires_s: float


@dataclass(slots=True)
class InstanceView:
    """An instance as the dispatcher knows it: its last report, and what has been sent to it since.

    While it is ``reserved_for`` a request that waits for its room, nobody else goes there. ``promised_bytes`` of KV are
    to come by migration, as far as their sources have not reported them handed over.
    """

    peer: Peer
    kind: str
    model: ModelInfo
    report: LoadReport | None = None
    in_flight: dict[str, PlacementInFlight] = field(default_factory=dict)  # by request id, in the order of placement
    num_blocks_in_flight: int = 0
    reserved_for: Place | None = None
    promised_bytes: int = 0
    told_to_drain: bool = False
    is_stale: bool = False
    last_turn: int = 0  # when it was last sent a request, in placements

    @property
    def is_terminating(self) -> bool:
        return self.told_to_drain or (self.report is not None and self.report.draining)

    @property
    def is_healthy(self) -> bool:
        """Whether it may be sent anything: it reports, and does not terminate."""
        return self.report is not None and not self.is_stale and not self.is_terminating

    @property
    def incoming_bytes(self) -> int:
        """What migrations are to bring and its report does not show as reserved yet."""
        return 0 if self.report is None else max(0, self.promised_bytes - self.report.kv_reserved_bytes)

    @property
    def num_running(self) -> int:
        """B: the requests that run there, with those under way."""
        return len(self.in_flight) + (0 if self.report is None else self.report.num_running)

    @property
    def capacity_tokens(self) -> int:
        """The longest request that it takes when nothing else is there: all the device memory that is usable now.

        ``NO_ROOM`` before its first report, and when it terminates.
        """
        report = self.report
        if report is None or self.is_terminating:
            return NO_ROOM
        return min(self.model.max_tokens, report.kv_total_bytes // report.bytes_per_block * report.tokens_per_block)

    def room_tokens(self, max_queue: int | None) -> int:
        """The longest request that it admits now; ``NO_ROOM`` where ``max_queue`` of them wait there already.

        With a ``max_queue`` of None it admits whatever it can ever hold.
        """
        report = self.report
        if report is None or self.is_stale:
            return NO_ROOM
        if max_queue is None:
            return self.capacity_tokens
        if report.num_waiting + len(self.in_flight) >= max_queue:
            return NO_ROOM
        free_bytes = report.kv_total_bytes + report.host_total_bytes - report.kv_needed_bytes - self.incoming_bytes
        num_free_blocks = free_bytes // report.bytes_per_block - self.num_blocks_in_flight
        return min(self.capacity_tokens, max(0, num_free_blocks) * report.tokens_per_block)

    def free_bytes(self) -> int:
        """M less the sum of V over what was reported, what is under way, and what migrations are to bring.

        Raises: AssertionError before the first report.
        """
        report = self.report
        assert report is not None
        under_way_bytes = self.num_blocks_in_flight * report.bytes_per_block
        return report.kv_total_bytes - report.virtual_usage_bytes - self.incoming_bytes - under_way_bytes

    def freeness(self, num_saved_tokens: int = 0) -> float:
        """F for a request whose first ``num_saved_tokens`` lie there; minus infinity before the first report."""
        report = self.report
        if report is None:
            return -inf
        saved_bytes = num_saved_tokens // report.tokens_per_block * report.bytes_per_block
        return freeness(self.free_bytes() + saved_bytes, 0, self.num_running, terminating=self.is_terminating)


Order = Callable[[InstanceView], float]
"""What a request is dispatched by: it goes to the highest of those that admit it."""


def by_freeness(view: InstanceView) -> float:
    """Llumnix's own."""
    return view.freeness()


class Fleet:
    """All instances, in such order that the best with room is found without asking each; and what is under way.

    ``max_queue`` bounds how many requests may wait at an instance (None: requests go at once wherever they could ever
    be held, and wait there). ``placement_ttl_s`` is how long a placement counts that no report confirms, and
    ``report_ttl_s`` how long a report does. ``order`` is what requests are dispatched by; prefixes count in freeness
    alone, and only where it is ``prefix_aware``.
    """

    def __init__(
        self,
        max_queue: int | None,
        placement_ttl_s: float,
        *,
        report_ttl_s: float = inf,
        order: Order = by_freeness,
        prefix_aware: bool = True,
    ) -> None:
        self.views: dict[Peer, InstanceView] = {}
        self.largest_tokens: int | None = None  # what the largest instance can ever hold; None while there is none
        self.prefixes = PrefixMap()
        self._max_queue = max_queue
        self._placement_ttl_s = placement_ttl_s
        self._report_ttl_s = report_ttl_s
        self._order = order
        self._prefix_aware = prefix_aware and order is by_freeness
        self._num_turns = 0
        self._reported_s: OrderedDict[Peer, float] = OrderedDict()  # of those not stale, the oldest first
        self._under_way: dict[str, InstanceView] = {}  # by request id, in the order of placement, so of expiry too
        self._reservations: dict[str, InstanceView] = {}  # by the id of the request that it is kept for
        self._keys: dict[Peer, tuple[float, int]] = {}  # under which it stands in the two orders
        self._by_order: list[tuple[float, Peer]] = []
        self._by_room: list[tuple[int, Peer]] = []

    # --- instances come, report, and go ------------------------------------------------------------------------------

    def add(self, view: InstanceView) -> None:
        self.remove(view.peer)
        self.views[view.peer] = view
        self.largest_tokens = max(self.largest_tokens or 0, view.model.max_tokens)
        self._sort_in(view.peer, self._key(view))

    def remove(self, peer: Peer) -> None:
        """Forget an instance and what was under way to it. Unknown ones are ignored."""
        view = self.views.pop(peer, None)
        if view is None:
            return
        for request_id in view.in_flight:
            del self._under_way[request_id]
        if view.reserved_for is not None:
            del self._reservations[view.reserved_for.request_id]
        if view.model.max_tokens == self.largest_tokens:
            self.largest_tokens = max((each.model.max_tokens for each in self.views.values()), default=None)
        self._reported_s.pop(peer, None)
        self.prefixes.forget(peer)
        self._sort_out(peer)

    def on_report(self, peer: Peer, report: LoadReport, now: float) -> None:
        """Take a newer report; what it has seen is under way no more. An older one changes nothing."""
        view = self.views[peer]
        if view.report is not None and report.sequence <= view.report.sequence:
            return
        view.report = report
        view.is_stale = False
        self._reported_s[peer] = now
        self._reported_s.move_to_end(peer)
        for request_id in report.accepted:
            if self._under_way.get(request_id) is view:
                self._drop(request_id)
        if view.reserved_for is not None and not self._can_hold(view, view.reserved_for):
            self._release_reservation(view)
        self._update(view)

    def expire_reports(self, now: float) -> None:
        """Instances that were silent for too long get nothing until they report again."""
        while self._reported_s:
            peer, reported_s = next(iter(self._reported_s.items()))
            if now < reported_s + self._report_ttl_s:
                return
            del self._reported_s[peer]
            view = self.views[peer]
            view.is_stale = True
            self._release_reservation(view)
            self._update(view)

    def drain(self, view: InstanceView) -> None:
        """It has been told to end; nothing goes there any more."""
        view.told_to_drain = True
        self._release_reservation(view)
        self._update(view)

    def promise(self, view: InstanceView, num_bytes: int) -> None:
        """So many more bytes (or fewer, where negative) are to come by migration. Who is gone counts no more."""
        view.promised_bytes += num_bytes
        if self.views.get(view.peer) is view:
            self._update(view)

    # --- finding a place ---------------------------------------------------------------------------------------------

    @property
    def room_tokens(self) -> int:
        """No request longer than this is admitted anywhere now."""
        return self._by_room[-1][0] if self._by_room else NO_ROOM

    def choose(self, place: Place) -> InstanceView | None:
        """The best instance that admits the request now; None where there is none. Ties end on the name.

        As long as an instance of the kind that made the request's tokens so far could hold the request, only such ones
        are considered, so that the answer stays the same. Of those that hold the prompt's beginning a few are looked at
        beside the one that is best without it.
        """
        if place.num_tokens > self.room_tokens:
            return None
        kind = self._wanted_kind(place)
        peers = self._best_first(place.num_tokens)
        best = next((view for peer in peers if (view := self._admitting(peer, place, kind)) is not None), None)
        if best is None or not place.prefix_names or not self._prefix_aware:
            return best
        key = self._keys[best.peer][0], best.peer
        for peer, num_tokens in self.prefixes.holders(place.prefix_names).items():
            view = self._admitting(peer, place, kind)
            if view is not None:
                key = max(key, (view.freeness(min(num_tokens, place.num_tokens)), peer))
        return self.views[key[1]]

    def _admitting(self, peer: Peer, place: Place, kind: str | None) -> InstanceView | None:
        """The instance, where it admits the request now."""
        view = self.views[peer]
        is_open = view.reserved_for is None or view.reserved_for.request_id == place.request_id
        has_room = place.num_tokens <= self._keys[peer][1]
        return view if has_room and is_open and peer != place.avoid and (kind is None or view.kind == kind) else None

    def _best_first(self, num_tokens: int) -> Iterable[Peer]:
        """All with room for so many tokens, and perhaps others: where few have room, these few, else simply all."""
        first = bisect_left(self._by_room, num_tokens, key=itemgetter(0))
        num_with_room = len(self._by_room) - first
        if num_with_room**2 > len(self._by_room):
            return (peer for _, peer in reversed(self._by_order))
        peers = (peer for _, peer in self._by_room[first:])
        return sorted(peers, key=lambda peer: (self._keys[peer][0], peer), reverse=True)

    def reserve_for(self, place: Place) -> None:
        """Let nobody else go to the instance with the most room among those that could hold the request.

        It is kept until the request is placed or ``release``d, or the instance can hold it no more. Where instances are
        kept for others, or have no room at all, nothing happens.
        """
        kind = self._wanted_kind(place)
        for room_tokens, peer in reversed(self._by_room):
            if room_tokens < 0 or place.request_id in self._reservations:
                return
            view = self.views[peer]
            if view.reserved_for is None and self._can_hold(view, place) and (kind is None or view.kind == kind):
                view.reserved_for = place
                self._reservations[place.request_id] = view
                self._update(view)
                return

    def release(self, request_id: str) -> None:
        """What was kept for the request is there for everybody."""
        view = self._reservations.get(request_id)
        if view is not None:
            self._release_reservation(view)
            self._update(view)

    def _release_reservation(self, view: InstanceView) -> None:
        if view.reserved_for is not None:
            del self._reservations[view.reserved_for.request_id]
            view.reserved_for = None

    def has_reservation(self, request_id: str) -> bool:
        """Whether an instance is."""
        return request_id in self._reservations

    @property
    def reserving_ids(self) -> list[str]:
        """The ids of the requests that instances are kept for."""
        return list(self._reservations)

    def _can_hold(self, view: InstanceView, place: Place) -> bool:
        return place.num_tokens <= view.capacity_tokens and view.peer != place.avoid

    def _wanted_kind(self, place: Place) -> str | None:
        """The kind that the request has to wait for; None where any will do."""
        if place.kind and any(view.kind == place.kind and self._can_hold(view, place) for view in self.views.values()):
            return place.kind
        return None

    # --- what is under way -------------------------------------------------------------------------------------------

    def place(self, view: InstanceView, gateway: Peer, place: Place, now: float, waited_s: float = 0.0) -> Placed:
        """Count the request as sent to an instance that has reported, and nowhere else."""
        report = view.report
        assert report is not None
        self._forget(place.request_id)
        self.release(place.request_id)
        placed = Placed(place.request_id, place.epoch, view.peer, waited_s)
        num_blocks = blocks_for(place.num_tokens, report.tokens_per_block)
        view.in_flight[place.request_id] = PlacementInFlight(gateway, placed, num_blocks, now + self._placement_ttl_s)
        view.num_blocks_in_flight += num_blocks
        self._under_way[place.request_id] = view
        self._num_turns += 1
        view.last_turn = self._num_turns
        if place.prefix_names and self._prefix_aware:
            pool_tokens = report.kv_total_bytes // report.bytes_per_block * report.tokens_per_block
            self.prefixes.learn(view.peer, place.prefix_names, pool_tokens)
        self._update(view)
        return placed

    def placement(self, request_id: str) -> PlacementInFlight | None:
        view = self._under_way.get(request_id)
        return None if view is None else view.in_flight[request_id]

    def forget(self, request_id: str, epoch: int) -> None:
        """Count the request at this or an older epoch no more. Unknown ids are ignored."""
        placement = self.placement(request_id)
        if placement is not None and placement.placed.epoch <= epoch:
            self._forget(request_id)

    def forget_gateway(self, gateway: Peer) -> None:
        """Whoever asked for these is gone."""
        ids = [request_id for request_id, placement in self._placements() if placement.gateway == gateway]
        for request_id in ids:
            self._forget(request_id)

    def expire(self, now: float) -> None:
        """Forget placements that no report has confirmed in time: their gateways may have died."""
        while (expires_s := self.next_expiry_s()) is not None and expires_s <= now:
            self._forget(next(iter(self._under_way)))

    def next_expiry_s(self) -> float | None:
        first = next(self._placements(), None)
        return None if first is None else first[1].expires_s

    def _placements(self) -> Iterator[tuple[str, PlacementInFlight]]:
        return ((request_id, view.in_flight[request_id]) for request_id, view in self._under_way.items())

    def _forget(self, request_id: str) -> None:
        if request_id in self._under_way:
            self._update(self._drop(request_id))

    def _drop(self, request_id: str) -> InstanceView:
        view = self._under_way.pop(request_id)
        view.num_blocks_in_flight -= view.in_flight.pop(request_id).num_blocks
        return view

    # --- the two orders ----------------------------------------------------------------------------------------------

    def _update(self, view: InstanceView) -> None:
        """Something has changed that the orders go by."""
        key = self._key(view)
        if self._keys[view.peer] != key:
            self._sort_out(view.peer)
            self._sort_in(view.peer, key)

    def _key(self, view: InstanceView) -> tuple[float, int]:
        """By what it is chosen, and the room that somebody might get: none where it is kept and not yet enough."""
        room_tokens = view.room_tokens(self._max_queue)
        if view.reserved_for is not None and room_tokens < view.reserved_for.num_tokens:
            room_tokens = NO_ROOM
        return self._order(view), room_tokens

    def _sort_in(self, peer: Peer, key: tuple[float, int]) -> None:
        self._keys[peer] = by_order, by_room = key
        insort(self._by_order, (by_order, peer))
        insort(self._by_room, (by_room, peer))

    def _sort_out(self, peer: Peer) -> None:
        by_order, by_room = self._keys.pop(peer)
        del self._by_order[bisect_left(self._by_order, (by_order, peer))]
        del self._by_room[bisect_left(self._by_room, (by_room, peer))]

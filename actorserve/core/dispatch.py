"""Dispatch: which instance a request goes to (Llumnix, section 4.4.3: to the highest freeness).

A request goes only where it can be admitted: where its blocks fit beside the KV of all started requests, in device and
host pool together, and the queue is under a bound. The load reports that a dispatcher acts on are always a little old,
and the usual error of such dispatchers is to send a burst of requests to whoever looked free a moment ago. So each
``InstanceView`` carries its own account of what was placed there and is not yet in a report: it counts as if it ran
already where freeness is asked for, and as waiting where room is.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from actorserve.core.blocks import blocks_for
from actorserve.core.freeness import freeness
from actorserve.core.messages import LoadReport, ModelInfo, Peer, Place, Placed

NO_ROOM = -1


@dataclass(frozen=True, slots=True)
class PlacementUnderWay:
    """A placement that no load report has confirmed yet."""

    gateway: Peer
    placed: Placed
    num_blocks: int
    expires_s: float


@dataclass(slots=True)
class InstanceView:
    """An instance as the dispatcher knows it: its last report, and what has been sent to it since.

    While it is ``kept_for`` a request that waits for its room, nobody else goes there.
    """

    peer: Peer
    kind: str
    model: ModelInfo
    report: LoadReport | None = None
    under_way: dict[str, PlacementUnderWay] = field(default_factory=dict)  # by request id, in the order of placement
    num_blocks_under_way: int = 0
    kept_for: Place | None = None

    @property
    def capacity_tokens(self) -> int:
        """The longest request that it takes when nothing else is there: all the device memory that is usable now.

        ``NO_ROOM`` before its first report, and when it terminates.
        """
        report = self.report
        if report is None or report.draining:
            return NO_ROOM
        return min(self.model.max_tokens, report.kv_total_bytes // report.bytes_per_block * report.tokens_per_block)

    def room_tokens(self, max_queue: int) -> int:
        """The longest request that it admits now; ``NO_ROOM`` where ``max_queue`` of them wait there already."""
        report = self.report
        if report is None or report.num_waiting + len(self.under_way) >= max_queue:
            return NO_ROOM
        free_bytes = report.kv_total_bytes + report.host_total_bytes - report.kv_needed_bytes
        num_free_blocks = free_bytes // report.bytes_per_block - self.num_blocks_under_way
        return min(self.capacity_tokens, max(0, num_free_blocks) * report.tokens_per_block)

    def freeness(self) -> float:
        """F over what was reported and what is under way; minus infinity before the first report."""
        if self.report is None:
            return float("-inf")
        return freeness(
            self.report.kv_total_bytes,
            self.report.virtual_usage_bytes + self.num_blocks_under_way * self.report.bytes_per_block,
            self.report.num_running + len(self.under_way),
            terminating=self.report.draining,
        )


class Fleet:
    """All instances, in such order that the freest with room is found without asking each; and what is under way.

    ``max_queue`` bounds how many requests may wait at an instance, ``placement_ttl_s`` how long a placement counts that
    no report confirms.
    """

    def __init__(self, max_queue: int, placement_ttl_s: float) -> None:
        self.views: dict[Peer, InstanceView] = {}
        self.largest_tokens: int | None = None  # what the largest instance can ever hold; None while there is none
        self._max_queue = max_queue
        self._placement_ttl_s = placement_ttl_s
        self._under_way: dict[str, InstanceView] = {}  # by request id, in the order of placement, so of expiry too
        self._kept: dict[str, InstanceView] = {}  # by the id of the request that it is kept for
        self._keys: dict[Peer, tuple[float, int]] = {}  # under which it stands in the two orders
        self._by_freeness: list[tuple[float, Peer]] = []
        self._by_room: list[tuple[int, Peer]] = []

    # --- instances come, report, and go ------------------------------------------------------------------------------

    def add(self, view: InstanceView) -> None:
        self.remove(view.peer)
        self.views[view.peer] = view
        self._on_size_change()
        self._sort_in(view)

    def remove(self, peer: Peer) -> None:
        """Forget an instance and what was under way to it. Unknown ones are ignored."""
        view = self.views.pop(peer, None)
        if view is None:
            return
        for request_id in view.under_way:
            del self._under_way[request_id]
        if view.kept_for is not None:
            del self._kept[view.kept_for.request_id]
        self._on_size_change()
        self._sort_out(peer)

    def on_report(self, peer: Peer, report: LoadReport) -> None:
        """Take a newer report; what it has seen is under way no more. An older one changes nothing."""
        view = self.views[peer]
        if view.report is not None and report.sequence <= view.report.sequence:
            return
        view.report = report
        for request_id in report.accepted:
            if self._under_way.get(request_id) is view:
                self._drop(request_id)
        if view.kept_for is not None and not self._can_hold(view, view.kept_for):
            del self._kept[view.kept_for.request_id]
            view.kept_for = None
        self._update(view)

    def _on_size_change(self) -> None:
        self.largest_tokens = max((view.model.max_tokens for view in self.views.values()), default=None)

    # --- finding a place ---------------------------------------------------------------------------------------------

    @property
    def room_tokens(self) -> int:
        """No request longer than this is admitted anywhere now."""
        return self._by_room[-1][0] if self._by_room else NO_ROOM

    def choose(self, place: Place) -> InstanceView | None:
        """The freest instance that admits the request now; None where there is none. Ties end on the name.

        As long as an instance of the kind that made the request's tokens so far could hold the request, only such ones
        are considered, so that the answer stays the same.
        """
        if place.num_tokens > self.room_tokens:
            return None
        kind = self._wanted_kind(place)
        for peer in self._freest_first(place.num_tokens):
            view = self.views[peer]
            if (
                place.num_tokens <= self._keys[peer][1]
                and peer != place.avoid
                and (kind is None or view.kind == kind)
                and (view.kept_for is None or view.kept_for.request_id == place.request_id)
            ):
                return view
        return None

    def _freest_first(self, num_tokens: int) -> Iterable[Peer]:
        """All with room for so many tokens, and perhaps others: where few have room, these few, else simply all."""
        first = bisect_left(self._by_room, num_tokens, key=itemgetter(0))
        num_with_room = len(self._by_room) - first
        if num_with_room**2 > len(self._by_room):
            return (peer for _, peer in reversed(self._by_freeness))
        peers = (peer for _, peer in self._by_room[first:])
        return sorted(peers, key=lambda peer: (self._keys[peer][0], peer), reverse=True)

    def keep_for(self, place: Place) -> None:
        """Let nobody else go to the instance with the most room among those that could hold the request.

        It is kept until the request is placed or ``release``d, or the instance can hold it no more. Where instances are
        kept for others, or have no room at all, nothing happens.
        """
        kind = self._wanted_kind(place)
        for room_tokens, peer in reversed(self._by_room):
            if room_tokens < 0 or place.request_id in self._kept:
                return
            view = self.views[peer]
            if view.kept_for is None and self._can_hold(view, place) and (kind is None or view.kind == kind):
                view.kept_for = place
                self._kept[place.request_id] = view
                self._update(view)
                return

    def release(self, request_id: str) -> None:
        """What was kept for the request is there for everybody."""
        view = self._kept.pop(request_id, None)
        if view is not None:
            view.kept_for = None
            self._update(view)

    def is_kept_for(self, request_id: str) -> bool:
        """Whether an instance is."""
        return request_id in self._kept

    @property
    def keepers(self) -> list[str]:
        """The ids of the requests that instances are kept for."""
        return list(self._kept)

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
        assert view.report is not None
        self._forget(place.request_id)
        self.release(place.request_id)
        placed = Placed(place.request_id, place.epoch, view.peer, waited_s)
        num_blocks = blocks_for(place.num_tokens, view.report.tokens_per_block)
        view.under_way[place.request_id] = PlacementUnderWay(gateway, placed, num_blocks, now + self._placement_ttl_s)
        view.num_blocks_under_way += num_blocks
        self._under_way[place.request_id] = view
        self._update(view)
        return placed

    def placement(self, request_id: str) -> PlacementUnderWay | None:
        view = self._under_way.get(request_id)
        return None if view is None else view.under_way[request_id]

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

    def _placements(self) -> Iterator[tuple[str, PlacementUnderWay]]:
        return ((request_id, view.under_way[request_id]) for request_id, view in self._under_way.items())

    def _forget(self, request_id: str) -> None:
        if request_id in self._under_way:
            self._update(self._drop(request_id))

    def _drop(self, request_id: str) -> InstanceView:
        view = self._under_way.pop(request_id)
        view.num_blocks_under_way -= view.under_way.pop(request_id).num_blocks
        return view

    # --- the two orders ----------------------------------------------------------------------------------------------

    def _update(self, view: InstanceView) -> None:
        """Something has changed that the orders go by."""
        if self._keys[view.peer] != self._key(view):
            self._sort_out(view.peer)
            self._sort_in(view)

    def _key(self, view: InstanceView) -> tuple[float, int]:
        """Freeness, and the room that somebody might get: none at all where it is kept and not yet enough."""
        room_tokens = view.room_tokens(self._max_queue)
        if view.kept_for is not None and room_tokens < view.kept_for.num_tokens:
            room_tokens = NO_ROOM
        return view.freeness(), room_tokens

    def _sort_in(self, view: InstanceView) -> None:
        self._keys[view.peer] = by_freeness, by_room = self._key(view)
        insort(self._by_freeness, (by_freeness, view.peer))
        insort(self._by_room, (by_room, view.peer))

    def _sort_out(self, peer: Peer) -> None:
        by_freeness, by_room = self._keys.pop(peer)
        del self._by_freeness[bisect_left(self._by_freeness, (by_freeness, peer))]
        del self._by_room[bisect_left(self._by_room, (by_room, peer))]

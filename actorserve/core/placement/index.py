"""The instances of each pool and kind sorted by score and by room, so that dispatch finds the best one without asking
all.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Final

from actorserve.core.messages import InstanceRole, Peer
from actorserve.core.placement.instance_view import NO_ROOM, InstanceView

_NO_BOUND: Final = 2**62  # more tokens than any request has


class KindIndex:
    """The views of one kind's instances in one pool that have reported, sorted by score, by ``admitted_tokens``, by
    capacity, and by the longest request that may wait there (``NO_ROOM`` if the instance is stale).
    """

    def __init__(self, kind: str, pool: InstanceRole) -> None:
        self.kind = kind
        self.pool = pool
        self._views: dict[Peer, InstanceView] = {}
        self._by_score: list[tuple[float, Peer]] = []
        self._by_room: list[tuple[int, Peer]] = []
        self._by_capacity: list[tuple[int, Peer]] = []
        self._by_awaited: list[tuple[int, Peer]] = []
        self._capacities: dict[Peer, tuple[int, int]] = {}  # as they stand in the lists by capacity

    def __len__(self) -> int:
        return len(self._views)

    def max_admitted_tokens(self, avoid: Peer | None = None) -> int:
        """The longest request that any instance except ``avoid`` admits now; ``NO_ROOM`` without any."""
        return _greatest(self._by_room, avoid)

    def max_capacity_tokens(self, avoid: Peer | None = None) -> int:
        """The longest request that any instance except ``avoid`` could hold if it were empty."""
        return _greatest(self._by_capacity, avoid)

    def max_awaited_tokens(self, avoid: Peer | None) -> int:
        """The longest request that may wait for any instance except ``avoid``: that one could hold it if it were empty,
        and reports.
        """
        return _greatest(self._by_awaited, avoid)

    def num_awaited(self, num_tokens: int, avoid: Peer | None) -> int:
        """How many instances so long a request may wait for, as ``max_awaited_tokens`` says. Closed ones hold none."""
        num_large = len(self._by_awaited) - bisect_left(self._by_awaited, num_tokens, key=itemgetter(0))
        is_one_to_avoid = avoid is not None and avoid in self._capacities and self._capacities[avoid][1] >= num_tokens
        return num_large - is_one_to_avoid

    def add(self, view: InstanceView) -> None:
        self._views[view.peer] = view
        self._sort_in(view)
        self._set_capacity(view)

    def update(self, view: InstanceView, score: float, admitted_tokens: int) -> None:
        if score != view.score or admitted_tokens != view.admitted_tokens:
            self._sort_out(view)
            view.score, view.admitted_tokens = score, admitted_tokens
            self._sort_in(view)

    def resize(self, view: InstanceView) -> bool:
        """Re-sort an instance whose capacity may have changed. Returns whether it has."""
        if _capacities(view) == self._capacities[view.peer]:
            return False
        self._drop_capacity(view)
        self._set_capacity(view)
        return True

    def remove(self, view: InstanceView) -> None:
        del self._views[view.peer]
        self._sort_out(view)
        self._drop_capacity(view)

    def num_admitting(self, num_tokens: int) -> int:
        """How many instances have room for ``num_tokens``; some may be reserved."""
        return len(self._by_room) - bisect_left(self._by_room, num_tokens, key=itemgetter(0))

    def by_room(self, place: int) -> InstanceView:
        """The instance at this place, counted from 0, of those with the most room."""
        return self._views[self._by_room[-1 - place][1]]

    def best_first(self, num_tokens: int) -> Iterable[InstanceView]:
        """All instances that admit ``num_tokens``, the highest score first; ties go to the greater name.

        If few instances do, only these are sorted. Otherwise the result is the whole index, including instances
        without enough room.
        """
        num_with_room = self.num_admitting(num_tokens)
        if num_with_room**2 > len(self._by_room):
            return self.highest_score_first()
        views = [self.by_room(place) for place in range(num_with_room)]
        views.sort(key=lambda view: (view.score, view.peer), reverse=True)
        return views

    def most_room_first(self) -> Iterator[InstanceView]:
        """The instances that admit any request now, the one with the most room first."""
        for admitted_tokens, peer in reversed(self._by_room):
            if admitted_tokens == NO_ROOM:
                return
            yield self._views[peer]

    def highest_score_first(self) -> Iterator[InstanceView]:
        """All instances; ties go to the greater name."""
        # A compiled generator expression would build the whole list, although dispatch mostly takes the first view.
        for _, peer in reversed(self._by_score):
            yield self._views[peer]

    def validate(self) -> None:
        """Raises: AssertionError if the sorted lists do not agree with the views."""
        assert all(peer == view.peer for peer, view in self._views.items()), "views are keyed by peer"
        by_score = sorted((view.score, peer) for peer, view in self._views.items())
        by_room = sorted((view.admitted_tokens, peer) for peer, view in self._views.items())
        by_capacity = sorted((view.capacity_tokens, peer) for peer, view in self._views.items())
        assert self._by_score == by_score, "the list by score agrees with the views"
        assert self._by_room == by_room, "the list by room agrees with the views"
        assert self._by_capacity == by_capacity, "the list by capacity agrees with the views"
        by_awaited = sorted((_capacities(view)[1], peer) for peer, view in self._views.items())
        assert self._by_awaited == by_awaited, "the list by what may wait agrees with the views"

    def _sort_in(self, view: InstanceView) -> None:
        insort(self._by_score, (view.score, view.peer))
        insort(self._by_room, (view.admitted_tokens, view.peer))

    def _sort_out(self, view: InstanceView) -> None:
        del self._by_score[bisect_left(self._by_score, (view.score, view.peer))]
        del self._by_room[bisect_left(self._by_room, (view.admitted_tokens, view.peer))]

    def _set_capacity(self, view: InstanceView) -> None:
        self._capacities[view.peer] = capacity_tokens, awaited_tokens = _capacities(view)
        insort(self._by_capacity, (capacity_tokens, view.peer))
        insort(self._by_awaited, (awaited_tokens, view.peer))

    def _drop_capacity(self, view: InstanceView) -> None:
        capacity_tokens, awaited_tokens = self._capacities.pop(view.peer)
        del self._by_capacity[bisect_left(self._by_capacity, (capacity_tokens, view.peer))]
        del self._by_awaited[bisect_left(self._by_awaited, (awaited_tokens, view.peer))]


class InstanceIndex:
    """The views of all instances that have reported, indexed by pool and kind."""

    def __init__(self) -> None:
        self._views: dict[Peer, InstanceView] = {}
        self._groups: dict[tuple[InstanceRole, str], KindIndex] = {}  # those that have instances
        self._group_of: dict[Peer, KindIndex] = {}
        self._found: dict[tuple[str | None, InstanceRole | None], list[KindIndex]] = {}  # since the groups changed
        self.has_roles = False  # whether any instance computes only one of the phases

    @property
    def views(self) -> Mapping[Peer, InstanceView]:
        return self._views

    def of_kind(self, kind: str | None, pool: InstanceRole | None = None) -> Collection[KindIndex]:
        """The indexes of ``kind`` (None: of all kinds) and ``pool`` (None: of all pools) that have instances."""
        found = self._found.get((kind, pool))
        if found is None:  # each placement asks, and groups change only when instances come, go or change their pool
            found = self._found[kind, pool] = [
                group
                for group in self._groups.values()
                if (kind is None or group.kind == kind) and (pool is None or group.pool is pool)
            ]
        return found

    def that_start(self, kind: str | None) -> Collection[KindIndex]:
        """Those of ``kind`` (None: of all kinds) whose instances requests are usually sent to first."""
        return [group for group in self.of_kind(kind) if group.pool is not InstanceRole.TOKEN]

    def max_prompt_tokens(self, kind: str | None, avoid: Peer | None) -> int:
        """The longest request that may wait for a prompt instance of ``kind``. Longer ones may start on token
        instances. Without roles none does.
        """
        if not self.has_roles:
            return _NO_BOUND
        prompts = self.of_kind(kind, InstanceRole.PROMPT)
        return max([found.max_awaited_tokens(avoid) for found in prompts], default=NO_ROOM)

    def group_of(self, view: InstanceView) -> KindIndex:
        return self._group_of[view.peer]

    def max_admitted_tokens(self, kind: str | None = None, avoid: Peer | None = None) -> int:
        """The longest request that any instance of ``kind`` (None: of any) except ``avoid`` admits now."""
        return max((found.max_admitted_tokens(avoid) for found in self.of_kind(kind)), default=NO_ROOM)

    def max_started_tokens(self, kind: str | None, avoid: Peer | None) -> int:
        """The longest request that any instance of ``kind`` that requests are sent to first admits now."""
        return max([found.max_admitted_tokens(avoid) for found in self.that_start(kind)], default=NO_ROOM)

    def max_capacity_tokens(self, kind: str | None, avoid: Peer | None = None) -> int:
        """The longest request that any instance of ``kind`` (None: of any) except ``avoid`` could hold if empty."""
        return max((found.max_capacity_tokens(avoid) for found in self.of_kind(kind)), default=NO_ROOM)

    def add(self, view: InstanceView) -> None:
        self._views[view.peer] = view
        key = view.pool, view.kind
        if key not in self._groups:
            self._groups[key] = KindIndex(view.kind, view.pool)
            self._on_groups_changed()
        self._group_of[view.peer] = group = self._groups[key]
        group.add(view)

    def update(self, view: InstanceView, score: float, admitted_tokens: int) -> None:
        """Set these values of an instance in the index, and re-sort it if they changed."""
        self._group_of[view.peer].update(view, score, admitted_tokens)

    def regroup(self, view: InstanceView) -> bool:
        """Re-sort an instance whose capacity or pool may have changed. Returns whether one of them has."""
        group = self._group_of[view.peer]
        if group.pool is view.pool:
            return group.resize(view)
        self.remove(view)
        self.add(view)
        return True

    def remove(self, view: InstanceView) -> None:
        del self._views[view.peer]
        group = self._group_of.pop(view.peer)
        group.remove(view)
        if not len(group):
            del self._groups[group.pool, group.kind]
            self._on_groups_changed()

    def _on_groups_changed(self) -> None:
        self._found.clear()
        self.has_roles = any(group.pool is not InstanceRole.MIXED for group in self._groups.values())

    def validate(self) -> None:
        """Raises: AssertionError if a view is not in exactly the index of its pool and kind, or an index is wrong."""
        for (pool, kind), found in self._groups.items():
            num_views = sum(view.kind == kind and view.pool is pool for view in self._views.values())
            assert len(found) == num_views > 0, f"the index of {pool} instances of kind {kind} holds these"
            found.validate()
        assert sum(map(len, self._groups.values())) == len(self._views), "each instance is in the index of its kind"
        assert self._group_of.keys() == self._views.keys(), "each instance has an index"


def _capacities(view: InstanceView) -> tuple[int, int]:
    """The longest request that the instance could hold if it were empty, and the longest one that may wait for it."""
    capacity_tokens = view.capacity_tokens
    return capacity_tokens, NO_ROOM if view.is_stale else capacity_tokens


def _greatest(by_value: list[tuple[int, Peer]], avoid: Peer | None) -> int:
    """The greatest value of a peer other than ``avoid``, in a sorted list."""
    for value, peer in reversed(by_value):
        if peer != avoid:
            return value
    return NO_ROOM

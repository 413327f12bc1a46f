"""The instances sorted by score and by room, so that dispatch finds the best one without asking every instance."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter

from actorserve.core.messages import Peer
from actorserve.core.placement.instance_view import NO_ROOM, InstanceView


class InstanceIndex:
    """Holds the views of all instances that have reported, sorted by ``score`` and by ``admitted_tokens``."""

    def __init__(self) -> None:
        self._views: dict[Peer, InstanceView] = {}
        self._by_score: list[tuple[float, Peer]] = []
        self._by_room: list[tuple[int, Peer]] = []

    @property
    def views(self) -> Mapping[Peer, InstanceView]:
        return self._views

    @property
    def max_admitted_tokens(self) -> int:
        """The longest request that any instance admits now."""
        return self._by_room[-1][0] if self._by_room else NO_ROOM

    def add(self, view: InstanceView) -> None:
        self._views[view.peer] = view
        self._sort_in(view)

    def update(self, view: InstanceView, score: float, admitted_tokens: int) -> None:
        """Set these values of an instance in the index, and re-sort it if they have changed."""
        if score != view.score or admitted_tokens != view.admitted_tokens:
            self._sort_out(view)
            view.score, view.admitted_tokens = score, admitted_tokens
            self._sort_in(view)

    def remove(self, view: InstanceView) -> None:
        del self._views[view.peer]
        self._sort_out(view)

    def best_first(self, num_tokens: int) -> Iterable[InstanceView]:
        """All instances that admit ``num_tokens``, the highest score first; ties go to the greater name.

        If few instances do, only these are sorted. Otherwise the result is the whole index, including instances
        without enough room.
        """
        first = bisect_left(self._by_room, num_tokens, key=itemgetter(0))
        num_with_room = len(self._by_room) - first
        if num_with_room**2 > len(self._by_room):
            return self._highest_score_first()
        views = [self._views[peer] for _, peer in self._by_room[first:]]
        views.sort(key=lambda view: (view.score, view.peer), reverse=True)
        return views

    def most_room_first(self) -> Iterator[InstanceView]:
        """The instances that admit any request now, the one with the most room first."""
        for admitted_tokens, peer in reversed(self._by_room):
            if admitted_tokens == NO_ROOM:
                return
            yield self._views[peer]

    def _highest_score_first(self) -> Iterator[InstanceView]:
        # A compiled generator expression would build the whole list, although dispatch mostly takes the first view.
        for _, peer in reversed(self._by_score):
            yield self._views[peer]

    def validate(self) -> None:
        """Raises: AssertionError if the sorted lists do not agree with the views."""
        assert all(peer == view.peer for peer, view in self._views.items()), "views are keyed by peer"
        by_score = sorted((view.score, peer) for peer, view in self._views.items())
        by_room = sorted((view.admitted_tokens, peer) for peer, view in self._views.items())
        assert self._by_score == by_score, "the list by score agrees with the views"
        assert self._by_room == by_room, "the list by room agrees with the views"

    def _sort_in(self, view: InstanceView) -> None:
        insort(self._by_score, (view.score, view.peer))
        insort(self._by_room, (view.admitted_tokens, view.peer))

    def _sort_out(self, view: InstanceView) -> None:
        del self._by_score[bisect_left(self._by_score, (view.score, view.peer))]
        del self._by_room[bisect_left(self._by_room, (view.admitted_tokens, view.peer))]

"""The instances sorted by score and by room, so that dispatch finds the best one without asking every instance."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter

from actorserve.core.messages import Peer
from actorserve.core.placement.instance_view import NO_ROOM, InstanceView


class InstanceIndex:
    """Holds the views of all instances that have reported, each with its score and its room in tokens."""

    def __init__(self) -> None:
        self._views: dict[Peer, InstanceView] = {}
        self._keys: dict[Peer, tuple[float, int]] = {}  # the score and the room under which each instance is sorted
        self._by_score: list[tuple[float, Peer]] = []
        self._by_room: list[tuple[int, Peer]] = []

    @property
    def views(self) -> Mapping[Peer, InstanceView]:
        return self._views

    @property
    def max_room_tokens(self) -> int:
        """No instance admits a longer request now."""
        return self._by_room[-1][0] if self._by_room else NO_ROOM

    def score(self, view: InstanceView) -> float:
        return self._keys[view.peer][0]

    def room_tokens(self, view: InstanceView) -> int:
        return self._keys[view.peer][1]

    def put(self, view: InstanceView, score: float, room_tokens: int) -> None:
        """Add an instance, or sort it in anew if its score or room has changed."""
        peer, key = view.peer, (score, room_tokens)
        self._views[peer] = view
        last_key = self._keys.get(peer)
        if last_key == key:
            return
        if last_key is not None:
            self._sort_out(peer, last_key)
        self._keys[peer] = key
        insort(self._by_score, (score, peer))
        insort(self._by_room, (room_tokens, peer))

    def remove(self, peer: Peer) -> None:
        del self._views[peer]
        self._sort_out(peer, self._keys.pop(peer))

    def best_first(self, num_tokens: int) -> Iterable[InstanceView]:
        """All instances with room for ``num_tokens``, the highest score first; ties end on the greater name.

        If few instances have room, only these are sorted. Otherwise all instances are walked through, and those
        without enough room come too.
        """
        first = bisect_left(self._by_room, num_tokens, key=itemgetter(0))
        num_with_room = len(self._by_room) - first
        if num_with_room**2 > len(self._by_room):
            return (self._views[peer] for _, peer in reversed(self._by_score))
        peers = (peer for _, peer in self._by_room[first:])
        best_first = sorted(peers, key=lambda peer: (self._keys[peer][0], peer), reverse=True)
        return (self._views[peer] for peer in best_first)

    def most_room_first(self) -> Iterator[InstanceView]:
        """The instances that admit any request now, the one with the most room first."""
        for room_tokens, peer in reversed(self._by_room):
            if room_tokens == NO_ROOM:
                return
            yield self._views[peer]

    def validate(self) -> None:
        """Raises: AssertionError if the sorted lists do not agree with the keys."""
        assert self._views.keys() == self._keys.keys(), "every indexed instance has one key"
        by_score = sorted((score, peer) for peer, (score, _) in self._keys.items())
        by_room = sorted((room_tokens, peer) for peer, (_, room_tokens) in self._keys.items())
        assert self._by_score == by_score, "the list by score agrees with the keys"
        assert self._by_room == by_room, "the list by room agrees with the keys"

    def _sort_out(self, peer: Peer, key: tuple[float, int]) -> None:
        score, room_tokens = key
        del self._by_score[bisect_left(self._by_score, (score, peer))]
        del self._by_room[bisect_left(self._by_room, (room_tokens, peer))]

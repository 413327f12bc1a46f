"""The cluster's queue: requests that no instance can admit yet.

It is FastServe's skip-join queue (``core.scheduling.mlfq``), of which only joining and promotion matter here, for
nobody is served while it waits: short prompts stand before long ones, until these have waited long enough. Classes of
priority come before levels, the lower number first. The classes below the most urgent one keep a minimum share of what
is dispatched, in equal parts: a class that is owed a turn has its first request before everybody else.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Final

from actorserve.core.messages import Attained, Peer, Place
from actorserve.core.scheduling.mlfq import MultiLevelQueue

MAX_RETRY_AFTER_S: Final = 60.0
"""No client is told to stay away longer: more is not known of the future."""

_NUM_DEPARTURES = 64


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that waits, and who asks for it."""

    gateway: Peer
    place: Place
    since_s: float


class _Class:
    """The requests of one priority. Of its minimum share ``owed`` turns are due to it, at most one."""

    __slots__ = ("owed", "queue")

    def __init__(self, queue: MultiLevelQueue[str]) -> None:
        self.queue = queue
        self.owed = 0.0

    @property
    def is_owed_a_turn(self) -> bool:
        return self.owed > 1.0 - 1e-9  # parts of a turn add up to a whole one but for rounding


class ClusterQueue:
    """The requests in their order, and how fast they get away.

    ``promote_after_s`` is by priority; ``min_share`` is from 0 to below 1. The coordinator knows instances of many
    speeds, which come and go: so what a prefill needs is counted in first quanta of the instance that was asked.
    """

    def __init__(self, promote_after_s: Callable[[int], float], min_share: float) -> None:
        self.waiting: dict[str, WaitingRequest] = {}  # by request id
        self.num_tokens = 0  # of all of them
        self._promote_after_s = promote_after_s
        self._min_share = min_share
        self._classes: dict[int, _Class] = {}  # those with requests, the most urgent first
        self._sizes: list[tuple[int, str]] = []  # a heap; an entry whose request has left is dropped when it comes up
        self._departures_s: deque[float] = deque(maxlen=_NUM_DEPARTURES)  # before them, when the line began

    def __len__(self) -> int:
        return len(self.waiting)

    def join(self, waiting: WaitingRequest, num_quanta: float, now: float) -> None:
        """To the back of its level; its prefill takes ``num_quanta`` first quanta."""
        place = waiting.place
        if not self.waiting:
            self._departures_s.clear()
            self._departures_s.append(now)
        if place.priority not in self._classes:
            queue = MultiLevelQueue[str](1.0, self._promote_after_s(place.priority))
            self._classes[place.priority] = _Class(queue)
            self._classes = dict(sorted(self._classes.items()))
        self.waiting[place.request_id] = waiting
        self.num_tokens += place.num_tokens
        queue = self._classes[place.priority].queue
        promotion_s = queue.next_change_s(now)
        if promotion_s is not None and promotion_s <= now:
            queue.order(now)  # promotes who is due, so that they are before the one that comes
        queue.join(place.request_id, num_quanta, now, Attained(waited_s=place.waited_s))
        heappush(self._sizes, (place.num_tokens, place.request_id))

    def avoid(self, request_id: str, peer: Peer | None) -> None:
        """It may go anywhere but there, and keeps its turn."""
        waiting = self.waiting[request_id]
        self.waiting[request_id] = replace(waiting, place=replace(waiting.place, avoid=peer))

    def remove(self, request_id: str, now: float) -> WaitingRequest:
        """It has a place, or gave up."""
        waiting = self.waiting.pop(request_id)
        self.num_tokens -= waiting.place.num_tokens
        its_class = self._classes[waiting.place.priority]
        its_class.queue.remove(request_id)
        if not len(its_class.queue):
            del self._classes[waiting.place.priority]
        if len(self._sizes) > 2 * len(self.waiting) + 64:
            self._sizes = [(each.place.num_tokens, each.place.request_id) for each in self.waiting.values()]
            heapify(self._sizes)
        self._departures_s.append(now)
        return waiting

    def dispatch(self, request_id: str, now: float) -> WaitingRequest:
        """It has a place: ``remove`` it, and count it against the shares of the classes."""
        lower = [each for number, each in enumerate(self._classes.values()) if number]
        for each in lower:
            each.owed += self._min_share / len(lower)
        self._classes[self.waiting[request_id].place.priority].owed -= 1.0
        for each in self._classes.values():
            each.owed = min(max(each.owed, 0.0), 1.0)
        return self.remove(request_id, now)

    def order(self, now: float) -> Sequence[str]:
        """The ids of all, the most urgent first; it stays as it is, whatever happens afterwards."""
        owed: list[str] = []
        others: list[Sequence[str]] = []
        for each in self._classes.values():
            order = each.queue.order(now)
            num_owed = int(each.is_owed_a_turn)
            owed += order[:num_owed]
            others.append(order[num_owed:] if num_owed else order)
        if len(others) == 1 and not owed:
            return others[0]
        return [*owed, *(request_id for order in others for request_id in order)]

    @property
    def num_classes(self) -> int:
        """How many priorities wait."""
        return len(self._classes)

    @property
    def first_priority(self) -> int | None:
        """That of the most urgent class; None where nobody waits."""
        return next(iter(self._classes), None)

    def leads(self, request_id: str, now: float) -> bool:
        """Whether no more urgent class goes before it: it is of the most urgent one, or has the turn that is owed."""
        priority = self.waiting[request_id].place.priority
        its_class = self._classes[priority]
        is_owed = its_class.is_owed_a_turn and its_class.queue.order(now)[0] == request_id
        return is_owed or priority == self.first_priority

    def is_overdue(self, request_id: str, now: float) -> bool:
        """Whether it has waited so long that its queue has promoted it."""
        waiting = self.waiting[request_id]
        return now >= waiting.since_s - waiting.place.waited_s + self._promote_after_s(waiting.place.priority)

    def shortest_tokens(self) -> int | None:
        """What the shortest of them needs; None where nobody waits."""
        while self._sizes:
            num_tokens, request_id = self._sizes[0]
            waiting = self.waiting.get(request_id)
            if waiting is not None and waiting.place.num_tokens == num_tokens:  # else it left, and may have come again
                return num_tokens
            heappop(self._sizes)
        return None

    def drain_s(self, now: float) -> float:
        """How long it will take until all who wait now are gone, at the pace of the last departures.

        While nobody leaves, it grows with the time since somebody did.
        """
        if not self._departures_s:
            return 0.0
        return len(self.waiting) * (now - self._departures_s[0]) / max(1, len(self._departures_s) - 1)

"""The cluster's queue: the requests that no instance can admit yet.

It is FastServe's skip-join queue (``core.scheduling.mlfq``). Only joining and promotion matter here, because no request
is served while it waits: short prompts stand before long ones until the long ones have waited long enough. Classes of
priority come before levels, the lower number first. The classes below the most urgent one keep a minimum share of the
dispatched requests (``core.scheduling.fair_share``): if a class is owed a turn, its first request goes before all
others.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from actorserve.core.messages import Attained, Peer, Place
from actorserve.core.placement.dispatch import Need
from actorserve.core.scheduling.fair_share import FairShare, MinShare
from actorserve.core.scheduling.mlfq import MultiLevelQueue

MAX_RETRY_AFTER_S: Final = 60.0
"""No client is told to stay away longer, because no prediction reaches further."""

_NUM_DEPARTURES = 64

_ONE_TURN = 1.0 - 1e-9
"""Parts of a turn add up to a whole one, except for rounding."""


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that waits, and the gateway that asked for it."""

    gateway: Peer
    place: Place
    since_s: float

    @property
    def need(self) -> Need:
        return Need(self.place.kind, self.place.avoid)


class _Class:
    """The requests of one priority, and the turns that they are owed, at most one."""

    __slots__ = ("queue", "share")

    def __init__(self, queue: MultiLevelQueue[str]) -> None:
        self.queue = queue
        self.share = FairShare()

    @property
    def is_owed_a_turn(self) -> bool:
        return self.share.owed > _ONE_TURN


class ClusterQueue:
    """The waiting requests in their order, and the pace at which they leave.

    ``promote_after_s`` gives the promotion time of a priority; ``min_share`` is from 0 to below 1, else ValueError.
    Instances of many speeds come and go. Therefore the time of a prefill is counted in first quanta of the instance
    that it was estimated for.
    """

    def __init__(self, promote_after_s: Callable[[int], float], min_share: float) -> None:
        self.waiting: dict[str, WaitingRequest] = {}  # by request id
        self.num_tokens = 0  # of all waiting requests
        self._promote_after_s = promote_after_s
        self._min_share = MinShare(min_share)
        self._classes: dict[int, _Class] = {}  # the priorities that have requests, the most urgent first
        self._sizes: dict[Need, list[int]] = {}  # the tokens of the requests with each need, the least first
        # The first may be the time at which the queue began to fill.
        self._departures_s: deque[float] = deque(maxlen=_NUM_DEPARTURES)

    def __len__(self) -> int:
        return len(self.waiting)

    def join(self, waiting: WaitingRequest, num_quanta: float, now: float) -> None:
        """Add a request to the back of its level. Its prefill takes ``num_quanta`` first quanta."""
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
            queue.order(now)  # promotes the requests that are due, so that they stand before the new one
        queue.join(place.request_id, num_quanta, now, Attained(waited_s=place.waited_s))
        self._add_size(waiting)

    def avoid(self, request_id: str, peer: Peer | None) -> None:
        """Let the request go to any instance except ``peer`` from now on. It keeps its turn."""
        waiting = self.waiting[request_id]
        self._drop_size(waiting)
        self.waiting[request_id] = waiting = replace(waiting, place=replace(waiting.place, avoid=peer))
        self._add_size(waiting)

    def remove(self, request_id: str, now: float) -> WaitingRequest:
        """Take out a request that was dispatched or has given up."""
        waiting = self.waiting.pop(request_id)
        self.num_tokens -= waiting.place.num_tokens
        queue = self._classes[waiting.place.priority].queue
        queue.remove(request_id)
        if not len(queue):
            del self._classes[waiting.place.priority]
        self._drop_size(waiting)
        self._departures_s.append(now)
        return waiting

    def dispatch(self, request_id: str, now: float) -> WaitingRequest:
        """Take out a request that was dispatched, and count this turn against the shares of the classes."""
        num_lower = len(self._classes) - 1
        due = self._min_share.of_all(num_lower) if num_lower else 0.0
        own_priority = self.waiting[request_id].place.priority
        for number, (priority, class_) in enumerate(self._classes.items()):
            class_.share.settle(due if number else 0.0, float(priority == own_priority), least=0.0, most=1.0)
        return self.remove(request_id, now)

    def order(self, now: float) -> Sequence[str]:
        """The ids of all waiting requests, the most urgent first. Later changes do not affect this list."""
        owed: list[str] = []
        others: list[Sequence[str]] = []
        for class_ in self._classes.values():
            order = class_.queue.order(now)
            num_owed = int(class_.is_owed_a_turn)
            owed += order[:num_owed]
            others.append(order[num_owed:] if num_owed else order)
        if len(others) == 1 and not owed:
            return others[0]
        return [*owed, *(request_id for order in others for request_id in order)]

    @property
    def num_classes(self) -> int:
        """How many priorities have waiting requests."""
        return len(self._classes)

    @property
    def first_priority(self) -> int | None:
        """The priority of the most urgent class; None if no request waits."""
        return next(iter(self._classes), None)

    def leads(self, request_id: str, now: float) -> bool:
        """Whether no more urgent class goes before it: it is of the most urgent class, or has the turn that is owed."""
        priority = self.waiting[request_id].place.priority
        class_ = self._classes[priority]
        has_owed_turn = class_.is_owed_a_turn and class_.queue.order(now)[0] == request_id
        return has_owed_turn or priority == self.first_priority

    def is_overdue(self, request_id: str, now: float) -> bool:
        """Whether the request has waited for its promotion time."""
        waiting = self.waiting[request_id]
        return now >= waiting.since_s - waiting.place.waited_s + self._promote_after_s(waiting.place.priority)

    @property
    def sizes(self) -> Mapping[Need, Sequence[int]]:
        """The tokens of the requests with each need, the least first. Needs that no waiting request has are absent."""
        return self._sizes

    def drain_s(self, now: float) -> float:
        """How many seconds it will take until all waiting requests have left, at the pace of the last departures.

        While no request leaves, this grows with the time since the last departure.
        """
        if not self._departures_s:
            return 0.0
        return len(self.waiting) * (now - self._departures_s[0]) / max(1, len(self._departures_s) - 1)

    def validate(self) -> None:
        """Raises: AssertionError if a request is not in exactly its class, or an account does not add up."""
        assert all(request_id == waiting.place.request_id for request_id, waiting in self.waiting.items()), (
            "waiting requests are keyed by id"
        )
        num_tokens = sum(waiting.place.num_tokens for waiting in self.waiting.values())
        assert self.num_tokens == num_tokens, "num_tokens is the sum over the waiting requests"
        assert list(self._classes) == sorted(self._classes), "classes stand in order of priority"
        for priority, class_ in self._classes.items():
            ids = {request_id for request_id, waiting in self.waiting.items() if waiting.place.priority == priority}
            assert set(class_.queue) == ids, f"the class of priority {priority} holds the requests of that priority"
            assert ids, f"the class of priority {priority} is not empty"
            assert 0.0 <= class_.share.owed <= 1.0, f"priority {priority} is owed at most one turn"
            class_.queue.validate()
        assert sum(len(class_.queue) for class_ in self._classes.values()) == len(self.waiting), (
            "each request is in one class"
        )
        sizes: dict[Need, list[int]] = {}
        for waiting in self.waiting.values():
            insort(sizes.setdefault(waiting.need, []), waiting.place.num_tokens)
        assert self._sizes == sizes, "the sizes by need are those of the waiting requests"

    def _add_size(self, waiting: WaitingRequest) -> None:
        insort(self._sizes.setdefault(waiting.need, []), waiting.place.num_tokens)

    def _drop_size(self, waiting: WaitingRequest) -> None:
        sizes = self._sizes[waiting.need]
        del sizes[bisect_left(sizes, waiting.place.num_tokens)]
        if not sizes:
            del self._sizes[waiting.need]

"""Classes of requests by priority: the more urgent first, but no class starves."""

import math
from collections.abc import Callable, Collection, Sequence
from itertools import groupby, zip_longest

from actorserve.core.messages import Attained
from actorserve.core.messages.values import NEWCOMER
from actorserve.core.request import Request
from actorserve.core.scheduling.fair_share import FairShare, MinShare
from actorserve.core.scheduling.policy import SchedulingPolicy


class _Class:
    """The requests of one priority, and the seconds of service that they are owed (negative if they had too much).

    ``stands_first``: all of its requests stood first in the last order, because of what the class was owed.
    """

    __slots__ = ("num_requests", "policy", "served_s", "service_s", "share", "stands_first")

    def __init__(self, policy: SchedulingPolicy, owed_s: float) -> None:
        self.policy = policy
        self.num_requests = 0
        self.share = FairShare(owed_s)
        self.stands_first = False
        self.served_s = 0.0  # since the accounts were settled
        self.service_s = math.inf  # of one request in the last iteration that served one; infinite before that


class PriorityClasses:
    """One policy for each priority that has requests, made by ``make_policy(priority)``.

    The lower the number, the more urgent, as in vLLM's API. Classes come before levels: all requests of a class stand
    before those of the next class. But while they have requests, the classes below the most urgent one keep
    ``min_share`` (from 0 to below 1, else ValueError) of all attained service together, in equal parts
    (``core.scheduling.fair_share``). If a class got less, enough of its requests go before all others to make up for it
    in one iteration. So a large batch always holds the same few of its requests, and a small batch holds one now and
    then. If a class uses room that urgent requests leave free, only the service of the last iteration counts against
    its share.
    """

    def __init__(self, make_policy: Callable[[int], SchedulingPolicy], min_share: float) -> None:
        self._min_share = MinShare(min_share)
        any_class = make_policy(0)
        self.reserves_output = any_class.reserves_output
        self._classes_are_preemptive = any_class.is_preemptive
        self._make_policy = make_policy
        self._classes: dict[int, _Class] = {}  # the priorities that have requests, the most urgent first
        self._service_s = 0.0  # of one request in the last iteration that served any class

    @property
    def is_preemptive(self) -> bool:
        return self._classes_are_preemptive or len(self._classes) > 1

    @property
    def requests(self) -> Collection[Request]:
        return [request for class_ in self._classes.values() for request in class_.policy.requests]

    def add(self, request: Request, now: float, num_cached_tokens: int = 0, attained: Attained = NEWCOMER) -> None:
        priority = request.spec.priority
        if priority not in self._classes:
            # The class begins as if it had just been served. Otherwise a class would gain by leaving and coming back.
            self._classes[priority] = _Class(self._make_policy(priority), -self._service_s)
            self._classes = dict(sorted(self._classes.items()))
        class_ = self._classes[priority]
        class_.policy.add(request, now, num_cached_tokens, attained)
        class_.num_requests += 1

    def remove(self, request: Request) -> None:
        class_ = self._classes[request.spec.priority]
        class_.policy.remove(request)
        class_.num_requests -= 1
        if not class_.num_requests:
            del self._classes[request.spec.priority]

    def on_service(self, requests: Sequence[Request], service_s: float, now: float) -> Sequence[Request]:
        if not requests:
            return ()
        if len(self._classes) == 1:
            for only_class in self._classes.values():
                return self._on_service_of(only_class, requests, service_s, now)
        moving: list[Request] = []
        for priority, run in groupby(requests, key=lambda request: request.spec.priority):
            moving += self._on_service_of(self._classes[priority], list(run), service_s, now)
        return moving

    def _on_service_of(
        self, class_: _Class, requests: Sequence[Request], service_s: float, now: float
    ) -> Sequence[Request]:
        served_s = class_.served_s
        for _ in requests:
            served_s += service_s
        class_.served_s = served_s
        if service_s:
            class_.service_s = self._service_s = service_s
        return class_.policy.on_service(requests, service_s, now)

    def move(self, request: Request) -> None:
        self._classes[request.spec.priority].policy.move(request)

    def attained(self, request: Request, now: float) -> Attained:
        return self._classes[request.spec.priority].policy.attained(request, now)

    def order(self, now: float) -> Sequence[Request]:
        if len(self._classes) <= 1:
            for only_class in self._classes.values():
                only_class.served_s = only_class.share.owed = 0.0
                return only_class.policy.order(now)
            return ()
        self._settle()
        owed: list[Request] = []
        others: list[Request] = []
        for class_ in self._classes.values():
            order = class_.policy.order(now)
            num_owed = _num_owed(class_)
            class_.stands_first = num_owed >= class_.num_requests
            owed += order[:num_owed]
            others += order[num_owed:]
        return owed + others

    def next_starts_s(self, order: Sequence[Request], now: float, max_batch_requests: int) -> list[float]:
        """A request starts when its class's policy says, after the latest start of more urgent requests before it."""
        if len(self._classes) <= 1:
            for only_class in self._classes.values():
                return only_class.policy.next_starts_s(order, now, max_batch_requests)
            return []
        orders: dict[int, list[Request]] = {priority: [] for priority in self._classes}
        for request in order:
            orders[request.spec.priority].append(request)
        starts_in_class = {
            priority: iter(class_.policy.next_starts_s(orders[priority], now, max_batch_requests))
            for priority, class_ in self._classes.items()
        }
        latest_s = dict.fromkeys(self._classes, 0.0)
        starts_s: list[float] = []
        for priority, run in groupby(order, key=lambda request: request.spec.priority):
            after_s = max((latest for urgent, latest in latest_s.items() if urgent < priority), default=0.0)
            run_starts_s = [after_s + next(starts_in_class[priority]) for _ in run]
            latest_s[priority] = max(latest_s[priority], *run_starts_s)
            starts_s += run_starts_s
        return starts_s

    def num_by_level(self) -> Sequence[int]:
        """The sums over the classes."""
        counts = [class_.policy.num_by_level() for class_ in self._classes.values()]
        return [sum(at_level) for at_level in zip_longest(*counts, fillvalue=0)]

    def validate(self) -> None:
        """Raises: AssertionError if a class is empty, or the classes are out of order."""
        assert list(self._classes) == sorted(self._classes), "classes stand in order of priority"
        for priority, class_ in self._classes.items():
            assert class_.num_requests > 0, f"the class of priority {priority} is not empty"
            assert class_.served_s >= 0.0, f"the service of priority {priority} is not negative"

    def _settle(self) -> None:
        """Update what the classes are owed by the service since the last call."""
        served_s = sum(class_.served_s for class_ in self._classes.values())
        if not served_s:
            return
        share_of_others = self._min_share.of_others(len(self._classes) - 1)
        for index, class_ in enumerate(self._classes.values()):
            own_s, class_.served_s = class_.served_s, 0.0
            if index == 0:
                class_.share.owed = 0.0
                continue
            least_s = -own_s if own_s else -math.inf
            # A class whose requests all stand first could not get more, so its claims do not pile up for later.
            most_s = class_.share.owed if class_.stands_first else math.inf
            class_.share.settle(share_of_others * (served_s - own_s), own_s, least_s, most_s)


def _num_owed(class_: _Class) -> int:
    """How many of its requests stand first, so that one iteration makes up for what the class is owed."""
    owed_s = class_.share.owed
    return 1 + int(min(owed_s / class_.service_s, class_.num_requests)) if owed_s > 0.0 else 0

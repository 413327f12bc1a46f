"""Classes of requests by priority: the more urgent first, but none starves."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby

from actorserve.core.messages import Attained
from actorserve.core.messages.values import NEWCOMER
from actorserve.core.request import Request
from actorserve.core.scheduling.policy import SchedulingPolicy


class _Class:
    """The requests of one priority. ``owed_s`` is the service that its minimum share still owes it; below 0, what it
    has to wait off. ``stands_first``: because of that, all of its requests stood first in the last order.
    """

    __slots__ = ("num_requests", "owed_s", "policy", "served_s", "service_s", "stands_first")

    def __init__(self, policy: SchedulingPolicy, owed_s: float) -> None:
        self.policy = policy
        self.num_requests = 0
        self.owed_s = owed_s
        self.stands_first = False
        self.served_s = 0.0  # since the accounts were settled
        self.service_s = math.inf  # of one request in one iteration, the last time; none yet


class PriorityClasses:
    """One policy for each priority that has requests, made by ``make_policy(priority)``.

    The lower the number, the more urgent, as in vLLM's API. Classes come before levels: all of a class stand before
    those of the next. But while they have requests, the classes below the most urgent one keep ``min_share`` (from 0 to
    below 1, else ValueError) of all attained service together, in equal parts. A class that got less stands with so
    many requests before everybody else as make up for it in one iteration. So a large batch always holds a few of its
    requests, the same ones, and a small batch one now and then. Room that urgent requests leave is used by the others
    at no cost to their share, but for what they got in the last iteration.
    """

    def __init__(self, make_policy: Callable[[int], SchedulingPolicy], min_share: float) -> None:
        if not 0.0 <= min_share < 1.0:
            raise ValueError(f"min_share is {min_share}; expected a share from 0 to below 1")
        any_class = make_policy(0)
        self.reserves_output = any_class.reserves_output
        self._classes_are_preemptive = any_class.is_preemptive
        self._make_policy = make_policy
        self._min_share = min_share
        self._classes: dict[int, _Class] = {}  # those with requests, the most urgent first
        self._service_s = 0.0  # the last of any class

    @property
    def is_preemptive(self) -> bool:
        return self._classes_are_preemptive or len(self._classes) > 1

    def add(self, request: Request, now: float, num_cached_tokens: int = 0, attained: Attained = NEWCOMER) -> None:
        priority = request.spec.priority
        if priority not in self._classes:
            # It begins as if it had just been served, so that coming and going wins nothing.
            self._classes[priority] = _Class(self._make_policy(priority), -self._service_s)
            self._classes = dict(sorted(self._classes.items()))
        its_class = self._classes[priority]
        its_class.policy.add(request, now, num_cached_tokens, attained)
        its_class.num_requests += 1

    def remove(self, request: Request) -> None:
        its_class = self._classes[request.spec.priority]
        its_class.policy.remove(request)
        its_class.num_requests -= 1
        if not its_class.num_requests:
            del self._classes[request.spec.priority]

    def on_service(self, request: Request, service_s: float, now: float) -> None:
        its_class = self._classes[request.spec.priority]
        its_class.served_s += service_s
        if service_s:
            its_class.service_s = self._service_s = service_s
        its_class.policy.on_service(request, service_s, now)

    def attained(self, request: Request, now: float) -> Attained:
        return self._classes[request.spec.priority].policy.attained(request, now)

    def order(self, now: float) -> Sequence[Request]:
        if len(self._classes) <= 1:
            for alone in self._classes.values():
                alone.served_s = alone.owed_s = 0.0
                return alone.policy.order(now)
            return ()
        self._settle()
        owed: list[Request] = []
        others: list[Request] = []
        for each in self._classes.values():
            order = each.policy.order(now)
            num_owed = 1 + int(min(each.owed_s / each.service_s, each.num_requests)) if each.owed_s > 0.0 else 0
            each.stands_first = num_owed >= each.num_requests
            owed += order[:num_owed]
            others += order[num_owed:]
        return owed + others

    def next_starts_s(self, order: Sequence[Request], now: float, max_batch_requests: int) -> list[float]:
        """As the policy of its class says, after all of more urgent classes that stand before it."""
        if len(self._classes) <= 1:
            for alone in self._classes.values():
                return alone.policy.next_starts_s(order, now, max_batch_requests)
            return []
        orders: dict[int, list[Request]] = {priority: [] for priority in self._classes}
        for request in order:
            orders[request.spec.priority].append(request)
        inside = {
            priority: iter(each.policy.next_starts_s(orders[priority], now, max_batch_requests))
            for priority, each in self._classes.items()
        }
        latest_s = dict.fromkeys(self._classes, 0.0)
        starts_s: list[float] = []
        for priority, run in groupby(order, key=lambda request: request.spec.priority):
            after_s = max((latest for urgent, latest in latest_s.items() if urgent < priority), default=0.0)
            of_run = [after_s + next(inside[priority]) for _ in run]
            latest_s[priority] = max(latest_s[priority], *of_run)
            starts_s += of_run
        return starts_s

    def _settle(self) -> None:
        """Bring the accounts up to date with the service since the last time."""
        served_s = sum(each.served_s for each in self._classes.values())
        if not served_s:
            return
        # To have this share of all is to have ``rate`` of what the others have.
        share = self._min_share / (len(self._classes) - 1)
        rate = share / (1.0 - share)
        for index, each in enumerate(self._classes.values()):
            own_s, each.served_s = each.served_s, 0.0
            if index == 0:
                each.owed_s = 0.0
                continue
            owed_s = each.owed_s + rate * (served_s - own_s)
            if own_s:
                owed_s = max(owed_s - own_s, -own_s)
            # A class whose requests all stand first can have no more, so it does not pile up claims for later.
            each.owed_s = min(owed_s, each.owed_s) if each.stands_first else owed_s

"""The skip-join multi-level feedback queue (FastServe, section 4.1, Algorithm 1).

Queues Q1, Q2, ... have quanta that double; the first quantum is the shortest iteration of the profile. A new request
joins the highest queue whose quantum its first iteration fits into. A request that has used up its quantum goes down to
a queue whose quantum its next iteration fits into. A request that has waited too long goes up to Q1. Iterations take
requests from Q1 first, then from Q2, and so on. Levels are counted from 0 here: level 0 is Q1.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain
from typing import ClassVar, Generic, TypeVar

from actorserve.core.messages import Attained
from actorserve.core.messages.values import NEWCOMER
from actorserve.core.request import Request
from actorserve.core.timing.step_times import StepTimes

PROMOTE_AFTER_S = 1.0
"""The starvation limit, FastServe's alpha. Its default of 0.3 s is too short without memory to swap to, because a
promotion then costs a prefill.
"""

_TOLERANCE = 1.05
"""An iteration fits into a quantum that is shorter by this factor. Otherwise no prefill would fit into Q1, because the
shortest one takes hardly longer than the decode that the first quantum is made from.
"""

_USED_UP = 1.0 - 1e-9
"""This part of a quantum counts as all of it, because the sum of equal iterations may fall short of it by rounding."""

T = TypeVar("T", bound=Hashable)


class _Entry(Generic[T]):
    """One item's level, and the service that it has had."""

    __slots__ = ("item", "level", "number", "promotion_s", "service_s", "used_s", "waiting_since_s")

    def __init__(self, item: T, number: int, level: int, used_s: float, service_s: float, since_s: float) -> None:
        self.item = item
        self.number = number  # in order of arrival
        self.level = level
        self.used_s = used_s  # of the level's quantum
        self.service_s = service_s  # in all
        self.waiting_since_s = since_s
        self.promotion_s = math.inf  # when it is promoted, unless it is served before


class MultiLevelQueue(Generic[T]):
    """Items in levels. ``order`` goes level by level; inside a level, the item that came to it first goes first.

    ``first_quantum_s`` and ``promote_after_s`` must be above 0, else ValueError; with an infinite ``promote_after_s``
    no item is promoted. Levels are made as they are needed.

    Three rules are ours. An item that is promoted while in Q1 gets a fresh quantum but keeps its place in the level. Of
    several items that are promoted at once, the one that waited longest goes first. And if the queue
    ``promotes_singly``, the next item is promoted only after the item promoted before has gone down to its former level
    or is due for promotion again.
    """

    def __init__(
        self, first_quantum_s: float, promote_after_s: float = PROMOTE_AFTER_S, *, promotes_singly: bool = False
    ) -> None:
        if not 0.0 < first_quantum_s < math.inf:
            raise ValueError(
                f"the first quantum is {first_quantum_s} s; expected a time above 0 "
                "(it is the profile's shortest iteration: one decode without context)"
            )
        if not promote_after_s > 0.0:
            raise ValueError(f"promote_after_s is {promote_after_s:g}; expected a time above 0 s")
        self._promote_after_s = promote_after_s
        self._promotes_singly = promotes_singly
        self._promoted_from: dict[T, int] = {}  # the former level of each promoted item, until it is back there
        self._quanta = [first_quantum_s]
        self._levels: list[dict[T, None]] = [{}]
        self._entries: dict[T, _Entry[T]] = {}
        self._num_joined = 0
        self._order: list[T] | None = None  # kept while nothing has changed
        # A heap of (time, number, entry), one for each entry. Serving an item does not update its tuple, which keeps
        # service cheap. So a tuple's time may be before the entry's ``promotion_s``, but never after it.
        self._promotions: list[tuple[float, int, _Entry[T]]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        """All items, in order of arrival."""
        return iter(self._entries)

    def join(self, item: T, needed_s: float, now: float, attained: Attained = NEWCOMER) -> None:
        """Lines 6-9: to the back of the highest level whose quantum is at least ``needed_s``.

        An item that had a level elsewhere joins the first level here with at least that quantum, and the part of it
        that the item used counts here too. The time that it has waited counts for its promotion.
        """
        level = self._fitting_level(attained.quantum_s or needed_s)
        self._num_joined += 1
        since_s = now - attained.waited_s
        entry = _Entry(item, self._num_joined, level, attained.quantum_used_s, attained.service_s, since_s)
        entry.promotion_s = since_s + self._promote_after_s
        self._entries[item] = entry
        self._levels[level][item] = None
        heappush(self._promotions, (entry.promotion_s, entry.number, entry))
        self._order = None

    def remove(self, item: T) -> None:
        entry = self._entries.pop(item)
        self._promoted_from.pop(item, None)
        del self._levels[entry.level][item]
        self._order = None
        if len(self._promotions) > 2 * len(self._entries) + 64:  # otherwise its tuple is dropped when it is due
            self._promotions = [promotion for promotion in self._promotions if self._is_present(promotion[2])]
            heapify(self._promotions)

    def serve(self, items: Iterable[T], service_s: float, now: float) -> list[T]:
        """Count that each item was served for ``service_s``, and restart its waiting time. Returns the items that have
        used up their quanta: ``demote`` them.
        """
        entries, quanta = self._entries, self._quanta
        promotion_s = now + self._promote_after_s
        used_up = []
        for item in items:
            entry = entries[item]
            entry.service_s += service_s
            entry.used_s = used_s = entry.used_s + service_s
            entry.waiting_since_s = now
            entry.promotion_s = promotion_s
            if used_s >= quanta[entry.level] * _USED_UP:
                used_up.append(item)
        return used_up

    def demote(self, item: T, needed_s: float) -> None:
        """Lines 16-17: to the back of a lower level, the first one whose quantum is at least ``needed_s``."""
        entry = self._entries[item]
        self._restart(entry, max(self._fitting_level(needed_s), entry.level + 1))

    def rejoin(self, item: T, needed_s: float) -> None:
        """To the back of the highest level whose quantum is at least ``needed_s``, with a fresh quantum."""
        self._restart(self._entries[item], self._fitting_level(needed_s))

    def order(self, now: float) -> Sequence[T]:
        """Promote the items that are due, and return all items. Later changes do not affect this list."""
        if self._promotions and self._promotions[0][0] <= now:
            self._promote(now)
        if self._order is None:
            self._order = list(chain.from_iterable(self._levels))
        return self._order

    def attained(self, item: T, now: float) -> Attained:
        """The item's service and level, as durations. Its waiting time began with its last service or its arrival."""
        entry = self._entries[item]
        return Attained(entry.service_s, self._quanta[entry.level], entry.used_s, now - entry.waiting_since_s)

    def next_starts_s(self, order: Sequence[T], now: float, max_batch_requests: int) -> list[float]:
        """ENST of each item in ``order`` (section 4.2): the sooner of its promotion and of its turn.

        Its turn comes when all items of higher levels have gone down to its own level by using up the quanta between,
        as many items at a time as a batch holds. If promotions go singly, only the time of the next one is known.
        """
        turns_s = []
        num_above, work_s = 0, 0.0
        for level, quantum_s in zip(self._levels, self._quanta, strict=True):
            turns_s.append(work_s / max_batch_requests)
            num_above += len(level)
            work_s += num_above * quantum_s  # all items above the next level use up this level's quantum too
        singly = self._promotes_singly
        next_promoted = self._next_promoted() if singly and not self._promoted_from else None
        starts_s = []
        for item in order:
            entry = self._entries[item]
            start_s = turns_s[entry.level]
            if not singly or entry is next_promoted:
                start_s = min(start_s, max(entry.promotion_s - now, 0.0))
            starts_s.append(start_s)
        return starts_s

    def num_by_level(self) -> list[int]:
        """How many items are in each level."""
        return [len(level) for level in self._levels]

    def next_change_s(self, now: float) -> float | None:
        """When the next item is promoted, unless it is served before; None for never."""
        entry = self._next_promoted()
        return entry.promotion_s if entry is not None and entry.promotion_s < math.inf else None

    def validate(self) -> None:
        """Raises: AssertionError if the levels, the entries and the promotions do not agree."""
        num_placed = sum(len(level) for level in self._levels)
        assert num_placed == len(self._entries), "each item is in exactly one level"
        assert len(self._levels) == len(self._quanta), "each level has a quantum"
        for item, entry in self._entries.items():
            assert entry.item == item, "each item has its own entry"
            assert item in self._levels[entry.level], "each item is in the level of its entry"
        present = [(time_s, entry) for time_s, _, entry in self._promotions if self._is_present(entry)]
        assert len(present) == len(self._entries), "each item has one tuple in the heap of promotions"
        assert all(time_s <= entry.promotion_s for time_s, entry in present), "no tuple is later than the promotion"
        assert self._promoted_from.keys() <= self._entries.keys(), "only present items are promoted"
        for item, level in self._promoted_from.items():
            assert self._entries[item].level < level, "a promoted item is above its former level"
        order = list(chain.from_iterable(self._levels))
        assert self._order is None or self._order == order, "the kept order is that of the levels"

    def _promote(self, now: float) -> None:
        """Lines 18-20: an item that has waited long enough goes to the back of Q1, with a fresh quantum."""
        if self._promotes_singly and all(self._entries[item].promotion_s <= now for item in self._promoted_from):
            self._promoted_from.clear()  # the promoted item has waited too long again, so the turn passes on
        while not (self._promotes_singly and self._promoted_from):
            entry = self._next_promoted()
            if entry is None or entry.promotion_s > now:
                return
            entry.used_s = 0.0
            entry.promotion_s = now + self._promote_after_s
            heapreplace(self._promotions, (entry.promotion_s, entry.number, entry))
            if entry.level:
                self._promoted_from.setdefault(entry.item, entry.level)
                self._move(entry, 0)

    def _next_promoted(self) -> _Entry[T] | None:
        """The item whose promotion comes first. Outdated tuples at the top of the heap are dropped or corrected."""
        promotions = self._promotions
        while promotions:
            time_s, number, entry = promotions[0]
            if not self._is_present(entry):
                heappop(promotions)
            elif time_s < entry.promotion_s:
                heapreplace(promotions, (entry.promotion_s, number, entry))
            else:
                return entry
        return None

    def _is_present(self, entry: _Entry[T]) -> bool:
        return self._entries.get(entry.item) is entry

    def _fitting_level(self, needed_s: float) -> int:
        least_s = needed_s / _TOLERANCE
        while self._quanta[-1] < least_s:
            self._add_level()
        return bisect_left(self._quanta, least_s)

    def _restart(self, entry: _Entry[T], level: int) -> None:
        """To the back of ``level``, with a fresh quantum. An item that reaches its former level is promoted no more."""
        entry.used_s = 0.0
        self._move(entry, level)
        former_level = self._promoted_from.get(entry.item)
        if former_level is not None and level >= former_level:
            del self._promoted_from[entry.item]

    def _move(self, entry: _Entry[T], level: int) -> None:
        while len(self._levels) <= level:
            self._add_level()
        del self._levels[entry.level][entry.item]
        self._levels[level][entry.item] = None
        entry.level = level
        self._order = None

    def _add_level(self) -> None:
        self._quanta.append(2.0 * self._quanta[-1])
        self._levels.append({})


class SkipJoinMLFQ(MultiLevelQueue[Request]):
    """FastServe's policy. Times come from the profile, corrected by measurements; the quanta keep their first values.

    The next iteration is a prefill as long as prompt tokens (or, after a recompute, output tokens) have no KV yet, else
    one decode. The engine may cut a prefill into chunks; here the whole remaining prefill counts as one iteration, so
    that a prompt joins a level whose quantum covers it. As in Algorithm 1 only a used-up quantum demotes a request, so
    its next iteration may overrun what is left of the quantum. The overrun is not charged to the next level.

    Two rules are not the paper's. When its prompt has been computed, a request joins the level of its decodes, because
    the prompt has used up the quantum of its level, and the request would have to wait behind all newcomers, even if it
    has few tokens left. And promotions go one after the other: the next request that has waited too long is promoted
    when the one before it has gone down to its former level, or has itself waited too long again. In the paper all are
    promoted at once. If more requests wait than fit, then all have soon waited too long, and the paper's queue turns
    into a round robin. Simulated (OPT-13B, ShareGPT-like lengths, 4 requests/s), two, four and eight promotions at a
    time take 6, 24 and 33 % longer for a token than one does.
    """

    reserves_output = False
    is_preemptive = True
    promotes_singly: ClassVar[bool] = True

    def __init__(
        self,
        times: StepTimes,
        *,
        promote_after_s: float = PROMOTE_AFTER_S,
        first_quantum_s: float | None = None,
    ) -> None:
        quantum_s = times.min_iteration_s if first_quantum_s is None else first_quantum_s
        super().__init__(quantum_s, promote_after_s, promotes_singly=self.promotes_singly)
        self._times = times
        self._prefilling: set[Request] = set()  # they have no first token yet

    @property
    def requests(self) -> Collection[Request]:
        return self._entries.keys()

    def add(self, request: Request, now: float, num_cached_tokens: int = 0, attained: Attained = NEWCOMER) -> None:
        self.join(request, self._next_iteration_s(request, num_cached_tokens), now, attained)
        if not attained.quantum_s:
            self._prefilling.add(request)

    def remove(self, request: Request) -> None:
        super().remove(request)
        self._prefilling.discard(request)

    def on_service(self, requests: Sequence[Request], service_s: float, now: float) -> Sequence[Request]:
        used_up = self.serve(requests, service_s, now)
        if not self._prefilling:
            return used_up
        prefilled = [request for request in requests if request in self._prefilling and not _is_prefilling(request)]
        return [*prefilled, *(request for request in used_up if request not in prefilled)] if prefilled else used_up

    def move(self, request: Request) -> None:
        """The request has used up its quantum, or its prompt has been computed."""
        needed_s = self._next_iteration_s(request, request.num_fed)
        if request in self._prefilling and not _is_prefilling(request):
            self._prefilling.remove(request)
            self.rejoin(request, needed_s)
        else:
            self.demote(request, needed_s)

    def _next_iteration_s(self, request: Request, num_computed: int) -> float:
        """The time of the request's next iteration, if ``num_computed`` of its tokens have KV."""
        num_tokens = request.num_tokens
        if num_tokens - num_computed > 1:
            return self._times.prefill_s(num_tokens - num_computed, num_computed)
        return self._times.decode_s(1, num_tokens)


def _is_prefilling(request: Request) -> bool:
    """Whether its next iteration computes more than its newest token."""
    return request.num_tokens - request.num_fed > 1

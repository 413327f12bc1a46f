"""The skip-join multi-level feedback queue (FastServe, section 4.1, Algorithm 1).

Queues Q1, Q2, ... have quanta that double; the first is the shortest iteration of the profile. Whoever comes joins the
highest queue whose quantum its first iteration fits into. Whoever has used up its quantum goes down, so far that its
next iteration fits. Whoever has waited too long goes up to Q1. Iterations take from Q1 first, then from Q2, and so on.
Levels are counted from 0 here: level 0 is Q1.
"""

import math
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain
from typing import Generic, TypeVar

from actorserve.core.messages import Attained
from actorserve.core.messages.values import NEWCOMER
from actorserve.core.request import Request
from actorserve.core.timing.step_times import StepTimes

PROMOTE_AFTER_S = 0.3
"""FastServe's default for the starvation limit, its alpha."""

_USED_UP = 1.0 - 1e-9
"""Of a quantum: the times of equal iterations, added up, may fall short of it by rounding alone."""

T = TypeVar("T", bound=Hashable)


class _Place(Generic[T]):
    """Where one item stands."""

    __slots__ = ("item", "level", "number", "promotion_s", "service_s", "used_s", "waiting_since_s")

    def __init__(self, item: T, number: int, level: int, used_s: float, service_s: float, since_s: float) -> None:
        self.item = item
        self.number = number  # of its arrival
        self.level = level
        self.used_s = used_s  # of the level's quantum
        self.service_s = service_s  # in all
        self.waiting_since_s = since_s
        self.promotion_s = math.inf  # when it is promoted if nobody serves it before


class MultiLevelQueue(Generic[T]):
    """Items in levels. ``order`` goes level by level, and inside a level by who came to it first.

    ``first_quantum_s`` must be above 0, and ``promote_after_s`` too (infinite: never), else ValueError. Levels are made
    as they are needed. Three things are ours: who is promoted while in Q1 gets a fresh quantum but keeps its place in
    the line; of several that are promoted at once the one that waited longest goes first; and where the queue
    ``promotes_singly``, the next is promoted when the one before it has come down to the level that it was in, or is
    due again itself.
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
            raise ValueError(f"promote_after_s is {promote_after_s}; expected a time above 0 s")
        self._promote_after_s = promote_after_s
        self._promotes_singly = promotes_singly
        self._promoted_from: dict[T, int] = {}  # the level of each that was promoted, until it is there again
        self._quanta = [first_quantum_s]
        self._levels: list[dict[T, None]] = [{}]
        self._places: dict[T, _Place[T]] = {}
        self._num_joined = 0
        self._order: list[T] | None = None  # while nothing has changed
        # One entry (time, number, place) for each place. Its time is never after the place's ``promotion_s``, and
        # before it where the item was served meanwhile: to be served costs nothing here.
        self._promotions: list[tuple[float, int, _Place[T]]] = []

    def __len__(self) -> int:
        return len(self._places)

    def join(self, item: T, needed_s: float, now: float, attained: Attained = NEWCOMER) -> None:
        """Lines 6-9: to the back of the highest level whose quantum is at least ``needed_s``.

        One that had a level elsewhere goes to the first here with at least that quantum, with what it used of it. What
        it has waited counts for its promotion.
        """
        level = self._fitting_level(attained.quantum_s or needed_s)
        self._num_joined += 1
        since_s = now - attained.waited_s
        place = _Place(item, self._num_joined, level, attained.quantum_used_s, attained.service_s, since_s)
        place.promotion_s = since_s + self._promote_after_s
        self._places[item] = place
        self._levels[level][item] = None
        heappush(self._promotions, (place.promotion_s, place.number, place))
        self._order = None

    def remove(self, item: T) -> None:
        place = self._places.pop(item)
        self._promoted_from.pop(item, None)
        del self._levels[place.level][item]
        self._order = None
        if len(self._promotions) > 2 * len(self._places) + 64:  # else those that are gone leave when they are due
            self._promotions = [entry for entry in self._promotions if self._is_present(entry[2])]
            heapify(self._promotions)

    def serve(self, item: T, service_s: float, now: float) -> bool:
        """Count service, and begin its waiting anew. True if it has now used up its quantum: ``demote`` it."""
        place = self._places[item]
        place.service_s += service_s
        place.used_s += service_s
        place.waiting_since_s = now
        place.promotion_s = now + self._promote_after_s
        return place.used_s >= self._quanta[place.level] * _USED_UP

    def demote(self, item: T, needed_s: float) -> None:
        """Lines 16-17: down by one level at least, and to one whose quantum is at least ``needed_s``; to its back."""
        place = self._places[item]
        place.used_s = 0.0
        self._move(place, max(self._fitting_level(needed_s), place.level + 1))
        if place.level >= self._promoted_from.get(item, math.inf):
            del self._promoted_from[item]

    def order(self, now: float) -> Sequence[T]:
        """Promote who is due, and give all: a list that stays as it is, whatever happens to the queue afterwards."""
        if self._promotions and self._promotions[0][0] <= now:
            self._promote(now)
        if self._order is None:
            self._order = list(chain.from_iterable(self._levels))
        return self._order

    def attained(self, item: T, now: float) -> Attained:
        """What it has had and where it stands, in durations. It waited since it was last served, or since it came."""
        place = self._places[item]
        return Attained(place.service_s, self._quanta[place.level], place.used_s, now - place.waiting_since_s)

    def next_starts_s(self, order: Sequence[T], now: float, max_batch_requests: int) -> list[float]:
        """ENST of each in ``order`` (section 4.2): the sooner of its promotion and of its turn.

        Its turn comes when all those of higher levels have gone down to its own by using up the quanta between, so
        many of them at a time as a batch holds. Where promotions go singly, only the next one's time is known.
        """
        turns_s = []
        num_above, work_s = 0, 0.0
        for level, quantum_s in zip(self._levels, self._quanta, strict=True):
            turns_s.append(work_s / max_batch_requests)
            num_above += len(level)
            work_s += num_above * quantum_s  # all above the next level use up this one's quantum too
        singly = self._promotes_singly
        next_promoted = self._next_promoted() if singly and not self._promoted_from else None
        starts_s = []
        for item in order:
            place = self._places[item]
            start_s = turns_s[place.level]
            if not singly or place is next_promoted:
                start_s = min(start_s, max(place.promotion_s - now, 0.0))
            starts_s.append(start_s)
        return starts_s

    def next_change_s(self, now: float) -> float | None:
        """When somebody is promoted next if nobody is served before; None for never."""
        place = self._next_promoted()
        return place.promotion_s if place is not None and place.promotion_s < math.inf else None

    def _promote(self, now: float) -> None:
        """Lines 18-20: who has waited long enough goes to the back of Q1, with a fresh quantum."""
        if self._promotes_singly and all(self._places[item].promotion_s <= now for item in self._promoted_from):
            self._promoted_from.clear()  # it has waited again for so long: the turn passes on
        while not (self._promotes_singly and self._promoted_from):
            place = self._next_promoted()
            if place is None or place.promotion_s > now:
                return
            place.used_s = 0.0
            place.promotion_s = now + self._promote_after_s
            heapreplace(self._promotions, (place.promotion_s, place.number, place))
            if place.level:
                self._promoted_from.setdefault(place.item, place.level)
                self._move(place, 0)

    def _next_promoted(self) -> _Place[T] | None:
        """Whose promotion comes first. Entries found on the way that no longer hold are put right."""
        promotions = self._promotions
        while promotions:
            time_s, number, place = promotions[0]
            if not self._is_present(place):
                heappop(promotions)
            elif time_s < place.promotion_s:
                heapreplace(promotions, (place.promotion_s, number, place))
            else:
                return place
        return None

    def _is_present(self, place: _Place[T]) -> bool:
        return self._places.get(place.item) is place

    def _fitting_level(self, needed_s: float) -> int:
        while self._quanta[-1] < needed_s:
            self._add_level()
        return bisect_left(self._quanta, needed_s)

    def _move(self, place: _Place[T], level: int) -> None:
        while len(self._levels) <= level:
            self._add_level()
        del self._levels[place.level][place.item]
        self._levels[level][place.item] = None
        place.level = level
        self._order = None

    def _add_level(self) -> None:
        self._quanta.append(2.0 * self._quanta[-1])
        self._levels.append({})


class SkipJoinMLFQ(MultiLevelQueue[Request]):
    """FastServe's policy. Times are those of the profile, corrected by what is measured; quanta stay as they began.

    The next iteration is a prefill, as long as tokens of prompt (or, after a recompute, of output) have no KV yet, else
    one decode. The engine may cut a prefill into chunks; its iteration here is all that is left of it, so that a prompt
    finds a quantum that it can be done in. As in Algorithm 1 only a used-up quantum demotes: where something is left of
    it, the next iteration may overrun it. What was overrun is not charged to the next level.

    Promotions go one after the other: the next of those that have waited too long is promoted when the one before it
    has gone down to where it was, or has itself waited too long again. In the paper all are promoted at once. Where
    more requests wait than fit, all have waited too long soon, so that its queue turns into a round robin that swaps
    everything at every iteration. Simulated (OPT-13B, ShareGPT-like lengths, 2 requests/s, where FCFS still holds 0.3 s
    a token): 1.2 s a token and 110,000 swaps in 300 s; with one promotion at a time 0.05 s, and 170.
    """

    reserves_output = False
    is_preemptive = True

    def __init__(
        self,
        times: StepTimes,
        *,
        promote_after_s: float = PROMOTE_AFTER_S,
        first_quantum_s: float | None = None,
    ) -> None:
        quantum_s = times.min_iteration_s if first_quantum_s is None else first_quantum_s
        super().__init__(quantum_s, promote_after_s, promotes_singly=True)
        self._times = times

    def add(self, request: Request, now: float, num_cached_tokens: int = 0, attained: Attained = NEWCOMER) -> None:
        self.join(request, self._next_iteration_s(request, num_cached_tokens), now, attained)

    def on_service(self, request: Request, service_s: float, now: float) -> None:
        if self.serve(request, service_s, now):
            self.demote(request, self._next_iteration_s(request, request.num_computed))

    def _next_iteration_s(self, request: Request, num_computed: int) -> float:
        """With KV for so many of its tokens."""
        num_tokens = len(request.token_ids)
        if num_tokens - num_computed > 1:
            return self._times.prefill_s(num_tokens - num_computed, num_computed)
        return self._times.decode_s(1, num_tokens)

"""Auto-scaling: how many instances there are (Llumnix, section 4.4.3: by the mean freeness, between two bounds).

Llumnix takes the mean over instances. There a single idle one, whose freeness is its whole memory, hides that all the
others are full. So here the mean is over running requests: what is free in the cluster, over the requests in it. That
is what each instance would have if load were balanced, which migration sees to. Demand that has no KV yet counts too:
requests that wait on instances, and those that wait in the cluster.

An instance takes a while to start. Those being started count as free memory to come, so that none is started twice for
one need; where starts fail one after another, the pause before the next doubles each time. And what the cluster will
have free is foreseen for as long ahead as the last start took, by the trend of free memory and requests over the same
time back; each by itself, for their quotient leaps where few run.

To scale in is to tell one instance to end: freeness has it drain by migration. That is done only where those that stay
would be over the lower bound without it, and only after a quiet time as long as a start takes: what is missed later
comes back no sooner. All state is soft.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from actorserve.core.effects import Effect, Send, StartWorker
from actorserve.core.messages import Drain, Peer
from actorserve.core.placement.fleet import InstanceView

MAX_PAUSE_S: Final = 300.0
"""Where no start ever succeeds, one is tried this often all the same."""


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """Bounds of the mean freeness are in iterations: how many tokens each request can still generate.

    After ``hold_s`` below ``scale_out_below`` an instance is started, at most one per ``hold_s``. After ``hold_s``, or
    the time of a start if that is longer, above ``scale_in_above`` an instance ends. A start that has brought no report
    after ``start_timeout_s`` counts as failed. ``num_initial`` instances are already being started when scaling begins;
    their starts are not measured, because they were not ordered here.
    Raises: ValueError if a pair of bounds is not in order.
    """

    max_workers: int
    min_workers: int = 1
    scale_out_below: float = 64.0
    scale_in_above: float = 512.0
    hold_s: float = 5.0
    start_timeout_s: float = 600.0
    num_initial: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers:
            raise ValueError(f"min_workers is {self.min_workers}, and must be from 1 to max_workers {self.max_workers}")
        if not self.scale_out_below < self.scale_in_above:
            raise ValueError(
                f"scale_out_below is {self.scale_out_below}, and must be below scale_in_above {self.scale_in_above}"
            )


class _Sample(NamedTuple):
    """The demand at a time: tokens of KV, and requests."""

    now: float
    num_tokens: float
    num_requests: int


class Scaling:
    """Decides when an instance starts or ends."""

    def __init__(self, config: ScalingConfig) -> None:
        self.mean_freeness: float | None = None  # in iterations, as foreseen; None while there is no instance
        self.warm_up_s = 0.0  # how long the last start took, from the order to the first report
        self._config = config
        self._samples: deque[_Sample] = deque()
        self._starting_s: deque[float] = deque()  # when each start was ordered
        self._num_initial = config.num_initial  # of these no report came yet
        self._initial_until_s: float | None = None  # so long they are waited for; None before the first round
        self._num_failures = 0  # starts that failed since one last succeeded
        self._has_failed = False  # one has since the last round
        self._paused_until_s = -inf
        self._met: dict[Peer, bool] = {}  # whether it has reported
        self._below_since_s: float | None = None
        self._above_since_s: float | None = None
        self._too_few_since_s: float | None = None

    @property
    def num_starting(self) -> int:
        return self._num_initial + len(self._starting_s)

    def on_up(self, peer: Peer) -> None:
        self._met.setdefault(peer, False)

    def on_report(self, peer: Peer, now: float) -> None:
        """The first report of an instance says that a start is over: an initial one, else the one ordered first."""
        if self._met.get(peer) is False:
            self._met[peer] = True
            if self._num_initial:
                self._num_initial -= 1
            elif self._starting_s:
                self.warm_up_s = now - self._starting_s.popleft()
                self._num_failures = 0
                self._has_failed = False
                self._paused_until_s = -inf

    def on_start_failed(self) -> None:
        """The start that was ordered last will come to nothing. Another one may be ordered after a pause."""
        if self._starting_s:
            self._starting_s.pop()
            self._fail()

    def on_down(self, peer: Peer) -> None:
        self._met.pop(peer, None)

    def round(
        self, views: Iterable[InstanceView], num_waiting: int, waiting_tokens: int, now: float
    ) -> tuple[list[Effect], InstanceView | None]:
        """What is to be done, and whom it tells to end. ``num_waiting`` requests, of ``waiting_tokens``, have no place.

        Instances that were told to end and do not say so yet are told again.
        """
        self._give_up_late_starts(now)
        views = list(views)
        effects: list[Effect] = [
            Send(view.peer, Drain())
            for view in views
            if view.told_to_drain and view.report is not None and not view.report.draining
        ]
        # Those that are silent for a moment are still there.
        staying = [view for view in views if not view.is_terminating]
        present = [view for view in staying if view.report is not None]
        count = len(present) + max(self.num_starting, len(staying) - len(present))
        self._sample(present, num_waiting, waiting_tokens, now)
        capacity_tokens = sum(map(_capacity_tokens, present)) / max(1, len(present))
        self.mean_freeness = self._foresee(capacity_tokens * (len(present) + self.num_starting))
        out, in_ = self._config.scale_out_below, self._config.scale_in_above
        is_below = self.mean_freeness is not None and self.mean_freeness < out
        is_above = self.mean_freeness is not None and self.mean_freeness > in_
        self._below_since_s = _since(is_below, self._below_since_s, now)
        self._above_since_s = _since(is_above, self._above_since_s, now)
        self._too_few_since_s = _since(count < self._config.min_workers, self._too_few_since_s, now)
        hold_s = self._config.hold_s
        is_short = _has_lasted(self._below_since_s, hold_s, now) or _has_lasted(self._too_few_since_s, hold_s, now)
        if is_short and count < self._config.max_workers and now >= self._paused_until_s:
            self._begin_anew()
            self._starting_s.append(now)
            effects.append(StartWorker())
        elif (
            _has_lasted(self._above_since_s, max(hold_s, self.warm_up_s), now)
            and len(present) > self._config.min_workers
            and count == len(present) == len(views)  # nobody comes, and nobody goes
            and (self._foresee(capacity_tokens * (len(present) - 1)) or -inf) >= out
        ):
            self._begin_anew()
            leaving = min(present, key=lambda view: (_num_requests(view), view.peer))
            effects.append(Send(leaving.peer, Drain()))
            return effects, leaving
        return effects, None

    def _give_up_late_starts(self, now: float) -> None:
        """Wait for none any longer whose time is over, and pause if one has failed."""
        if self._initial_until_s is None:
            self._initial_until_s = now + self._config.start_timeout_s
        if self._initial_until_s <= now:
            self._num_initial = 0
        while self._starting_s and self._starting_s[0] + self._config.start_timeout_s <= now:
            self._starting_s.popleft()
            self._fail()
        if self._has_failed:
            self._has_failed = False
            pause_s = self._config.hold_s * 2.0 ** min(self._num_failures - 1, 30)
            self._paused_until_s = now + min(pause_s, MAX_PAUSE_S)

    def _fail(self) -> None:
        self._num_failures += 1
        self._has_failed = True

    def _begin_anew(self) -> None:
        """What was decided has to show first."""
        self._below_since_s = self._above_since_s = self._too_few_since_s = None

    def _sample(self, present: list[InstanceView], num_waiting: int, waiting_tokens: int, now: float) -> None:
        """Samples are of the demand alone, for what comes and goes of instances is no trend."""
        if not present:
            self._samples.clear()
            return
        num_tokens = waiting_tokens + sum(map(_demand_tokens, present))
        num_requests = num_waiting + sum(map(_num_requests, present))
        self._samples.append(_Sample(now, num_tokens, num_requests))
        while self._samples[0].now < now - max(self._config.hold_s, self.warm_up_s):
            self._samples.popleft()

    def _foresee(self, capacity_tokens: float) -> float | None:
        """The mean freeness now or when a start would be over, whichever is less, in a cluster that holds so much."""
        if not self._samples:
            return None
        last, ahead_s = self._samples[-1], self.warm_up_s
        freeness = (capacity_tokens - last.num_tokens) / max(1, last.num_requests)
        if not ahead_s or last.now - self._samples[0].now < self._config.hold_s / 2:
            return freeness
        tokens_then = last.num_tokens + ahead_s * _slope([(each.now, each.num_tokens) for each in self._samples])
        num_then = last.num_requests + ahead_s * _slope([(each.now, each.num_requests) for each in self._samples])
        return min(freeness, (capacity_tokens - max(0.0, tokens_then)) / max(1.0, num_then))


def _capacity_tokens(view: InstanceView) -> float:
    """The tokens of KV that it holds."""
    report = view.report
    return 0.0 if report is None else report.kv_total_bytes / report.bytes_per_block * report.tokens_per_block


def _demand_tokens(view: InstanceView) -> float:
    """What the requests there, and those under way to it, hold or want. Migrations take nothing from the sum."""
    report = view.report
    assert report is not None
    needed_bytes = max(report.virtual_usage_bytes, report.kv_needed_bytes + report.kv_wanted_bytes)
    num_blocks = needed_bytes / report.bytes_per_block + view.num_blocks_in_flight
    return num_blocks * report.tokens_per_block


def _num_requests(view: InstanceView) -> int:
    report = view.report
    return view.num_running + (0 if report is None else report.num_waiting)


def _since(holds: bool, since_s: float | None, now: float) -> float | None:
    """Since when it has held; None where it does not."""
    return (now if since_s is None else since_s) if holds else None


def _has_lasted(since_s: float | None, hold_s: float, now: float) -> bool:
    return since_s is not None and now >= since_s + hold_s


def _slope(points: list[tuple[float, float]]) -> float:
    """Of the line that fits them best (least squares); 0 where all are of one time."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0

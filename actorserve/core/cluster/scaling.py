"""Auto-scaling: how many instances there are (Llumnix, section 4.4.3: by the mean freeness, between two bounds).

Llumnix takes the mean over instances. A single idle instance, whose freeness is its whole memory, then hides that all
others are full. Therefore the mean here is over running requests: what is free in the cluster, divided by the requests
in it. Each instance would have that freeness if load were balanced, and migration balances it. Demand that has no KV
yet counts too: that of requests waiting on instances, and of requests waiting in the cluster.

An instance takes a while to start. Starting instances already count as free memory, so that one shortage starts only
one. If starts fail one after another, the pause before the next one doubles each time. The free memory of the cluster
is predicted as far ahead as the last start took, from the trend of the demand over a past of the same length. Tokens
and requests are predicted separately, because their quotient jumps when few requests run.

To scale in means to tell one instance to terminate; then its freeness makes migration drain it. This happens only if
the remaining instances would be over the lower bound without it, and only after a quiet time as long as a start takes,
because an instance that is needed again takes that long to come back. An instance that an operator cordoned counts as
one that runs, and its memory does not count. While there is one, no instance ends. All state is soft.

Pools (``core.pools``). What runs short is memory for requests that decode, so prompt instances and what they hold do
not count. A new instance is mixed, and helps the pool that needs it. Only mixed instances are told to terminate,
because the operator chose how many there are of each other role.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from actorserve.core.effects import Effect, Send, StartWorker
from actorserve.core.messages import Drain, InstanceRole, Peer
from actorserve.core.placement.instance_view import InstanceView, NewInstance

MAX_PAUSE_S: Final = 300.0
"""If no start ever succeeds, another one is still tried once in this time."""


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
        self.mean_freeness: float | None = None  # in iterations, as predicted; None while there is no instance
        self.warm_up_s = 0.0  # how long the last start took, from the order to the first report
        self.config = config
        self.target: int | None = None  # how many instances an operator wants; None: as many as the load needs
        self._samples: deque[_Sample] = deque()
        self._starting_s: deque[float] = deque()  # when each start was ordered
        self._num_initial = config.num_initial  # how many of these instances have not reported yet
        self._initial_until_s: float | None = None  # how long they are waited for; None before the first round
        self._num_failures = 0  # starts that failed since one last succeeded
        self._has_failed = False  # whether a start has failed since the last round
        self._paused_until_s = -inf
        self._has_reported: dict[Peer, bool] = {}  # of each instance that is up
        self._below_since_s: float | None = None
        self._above_since_s: float | None = None
        self._too_few_since_s: float | None = None

    def set_config(self, config: ScalingConfig) -> None:
        """Decide by these bounds from the next round on."""
        self.config = config

    @property
    def num_starting(self) -> int:
        return self._num_initial + len(self._starting_s)

    def on_up(self, peer: Peer) -> None:
        self._has_reported.setdefault(peer, False)

    def on_report(self, peer: Peer, now: float) -> None:
        """The first report of an instance ends a start: an initial one if any is left, else the one ordered first."""
        if self._has_reported.get(peer) is False:
            self._has_reported[peer] = True
            if self._num_initial:
                self._num_initial -= 1
            elif self._starting_s:
                self.warm_up_s = now - self._starting_s.popleft()
                self._num_failures = 0
                self._has_failed = False
                self._paused_until_s = -inf

    def on_start_failed(self) -> None:
        """The start that was ordered last has failed. Another one may be ordered after a pause."""
        if self._starting_s:
            self._starting_s.pop()
            self._fail()

    def on_down(self, peer: Peer) -> None:
        self._has_reported.pop(peer, None)

    def round(
        self, instances: Collection[NewInstance | InstanceView], num_waiting: int, waiting_tokens: int, now: float
    ) -> tuple[list[Effect], InstanceView | None]:
        """The effects of this round, and the instance that it tells to terminate.

        ``num_waiting`` requests of ``waiting_tokens`` together wait in the cluster. An instance that was told to
        terminate, and does not report so yet, is told again.
        """
        self._give_up_late_starts(now)
        views = [instance for instance in instances if isinstance(instance, InstanceView)]
        num_new = len(instances) - len(views)
        effects: list[Effect] = [
            Send(view.peer, Drain()) for view in views if view.told_to_drain and not view.report.draining
        ]
        present = [view for view in views if not view.is_closed]  # even if their reports are stale
        num_closed = sum(view.is_closed and (view.told_to_come_back or not view.is_terminating) for view in views)
        count = len(present) + num_closed + max(self.num_starting, num_new)
        decoding = [view for view in present if view.role is not InstanceRole.PROMPT]
        self._sample(decoding, num_waiting, waiting_tokens, now)
        capacity_tokens = sum(map(_capacity_tokens, decoding), 0.0) / max(1, len(decoding))
        self.mean_freeness = self._predict(capacity_tokens * (len(decoding) + self.num_starting))
        self._note_bounds(count, now)
        if count < self._most and now >= self._paused_until_s and self._is_short(count, now):
            self._reset_bounds()
            self._starting_s.append(now)
            effects.append(StartWorker())
        elif (
            count == len(present) == len(instances)  # no instance is starting or terminating
            and (mixed := [view for view in decoding if view.role is InstanceRole.MIXED])
            and self._is_one_too_many(count, capacity_tokens * (len(decoding) - 1), now)
        ):
            self._reset_bounds()
            terminating = min(mixed, key=lambda view: (_num_requests(view), view.peer))
            effects.append(Send(terminating.peer, Drain()))
            return effects, terminating
        return effects, None

    def validate(self) -> None:
        """Raises: AssertionError if the accounts of starts or the samples are out of bounds."""
        assert 0 <= self._num_initial <= self.config.num_initial, "the number of initial instances only falls"
        assert len(self._starting_s) <= self.config.max_workers, "no more starts are ordered than workers may run"
        assert list(self._starting_s) == sorted(self._starting_s), (
            "starts stand in the order in which they were ordered"
        )
        times_s = [sample.now for sample in self._samples]
        assert times_s == sorted(times_s), "samples stand in order of time"
        assert self._num_failures or not self._has_failed, "a failed start is counted"

    # --- starts ------------------------------------------------------------------------------------------------------

    def _give_up_late_starts(self, now: float) -> None:
        """Stop waiting for starts whose time is over, and pause if a start has failed."""
        if self._initial_until_s is None:
            self._initial_until_s = now + self.config.start_timeout_s
        if self._initial_until_s <= now:
            self._num_initial = 0
        while self._starting_s and self._starting_s[0] + self.config.start_timeout_s <= now:
            self._starting_s.popleft()
            self._fail()
        if self._has_failed:
            self._has_failed = False
            pause_s = self.config.hold_s * 2.0 ** min(self._num_failures - 1, 30)
            self._paused_until_s = now + min(pause_s, MAX_PAUSE_S)

    def _fail(self) -> None:
        self._num_failures += 1
        self._has_failed = True

    # --- the bounds --------------------------------------------------------------------------------------------------

    def _note_bounds(self, count: int, now: float) -> None:
        """Remember since when the mean freeness, or the number of instances, has been out of its bounds."""
        is_below = self.mean_freeness is not None and self.mean_freeness < self.config.scale_out_below
        is_above = self.mean_freeness is not None and self.mean_freeness > self.config.scale_in_above
        self._below_since_s = _since(is_below, self._below_since_s, now)
        self._above_since_s = _since(is_above, self._above_since_s, now)
        self._too_few_since_s = _since(count < self.config.min_workers, self._too_few_since_s, now)

    @property
    def _most(self) -> int:
        """How many instances may run."""
        return self.config.max_workers if self.target is None else self.target

    def _is_one_too_many(self, count: int, capacity_tokens: float, now: float) -> bool:
        """Whether one of ``count`` instances is to end. The others have this capacity."""
        if self.target is not None:
            return count > self.target
        is_free = (self._predict(capacity_tokens) or -inf) >= self.config.scale_out_below
        return self._is_ample(now) and count > self.config.min_workers and is_free

    def _is_short(self, count: int, now: float) -> bool:
        """Whether freeness has been too low, or instances too few, for long enough."""
        if self.target is not None:
            return count < self.target
        hold_s = self.config.hold_s
        return _has_lasted(self._below_since_s, hold_s, now) or _has_lasted(self._too_few_since_s, hold_s, now)

    def _is_ample(self, now: float) -> bool:
        """Whether freeness has been high for long enough."""
        return _has_lasted(self._above_since_s, max(self.config.hold_s, self.warm_up_s), now)

    def _reset_bounds(self) -> None:
        """Forget how long a bound has been crossed, because the decision has to take effect first."""
        self._below_since_s = self._above_since_s = self._too_few_since_s = None

    # --- the forecast ------------------------------------------------------------------------------------------------

    def _sample(self, present: Sequence[InstanceView], num_waiting: int, waiting_tokens: int, now: float) -> None:
        """Sample the demand. The memory is left out, because instances that come and go make no trend."""
        if not present:
            self._samples.clear()
            return
        num_tokens = waiting_tokens + sum(map(_demand_tokens, present), 0.0)
        num_requests = num_waiting + sum(map(_num_requests, present))
        self._samples.append(_Sample(now, num_tokens, num_requests))
        while self._samples[0].now < now - max(self.config.hold_s, self.warm_up_s):
            self._samples.popleft()

    def _predict(self, capacity_tokens: float) -> float | None:
        """The mean freeness now or when a start would be over, whichever is less, in a cluster of this capacity."""
        if not self._samples:
            return None
        last, ahead_s = self._samples[-1], self.warm_up_s
        freeness = (capacity_tokens - last.num_tokens) / max(1, last.num_requests)
        if not ahead_s or last.now - self._samples[0].now < self.config.hold_s / 2:
            return freeness
        tokens_then = last.num_tokens + ahead_s * _slope([(sample.now, sample.num_tokens) for sample in self._samples])
        num_then = last.num_requests + ahead_s * _slope(
            [(sample.now, float(sample.num_requests)) for sample in self._samples]
        )
        return min(freeness, (capacity_tokens - max(0.0, tokens_then)) / max(1.0, num_then))


def _capacity_tokens(view: InstanceView) -> float:
    """The tokens of KV that fit into the instance."""
    report = view.report
    return report.kv_total_bytes / report.bytes_per_block * report.tokens_per_block / report.row_shape.blocks_per_row


def _demand_tokens(view: InstanceView) -> float:
    """The tokens that requests there and placements in flight hold or want. Migrations do not change the sum over a
    cluster.
    """
    report = view.report
    needed_bytes = max(report.virtual_usage_bytes, report.kv_needed_bytes + report.kv_wanted_bytes)
    num_blocks = needed_bytes / report.bytes_per_block + view.num_blocks_in_flight
    return num_blocks * report.tokens_per_block / report.row_shape.blocks_per_row


def _num_requests(view: InstanceView) -> int:
    return view.num_running + view.report.num_waiting


def _since(holds: bool, since_s: float | None, now: float) -> float | None:
    """Since when a condition has held; None if it does not hold."""
    return (now if since_s is None else since_s) if holds else None


def _has_lasted(since_s: float | None, hold_s: float, now: float) -> bool:
    return since_s is not None and now >= since_s + hold_s


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the line that fits the points best (least squares); 0 if all points have the same time."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0

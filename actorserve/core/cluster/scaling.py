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

Pools (``core.pools``). Prompts and tokens are scaled apart. Memory runs short where requests decode, so the freeness is
that of token and mixed instances. Beside it, the pressure on each pool counts (``core.pools.pressure``): a pool whose
pressure stays over 1 gets an instance. Starting instances and the forecast count there, too. If both pools are short,
or an operator wants more instances, the more pressed pool gets the new one. Of the pools that would bear their load
easily with one instance less, the least pressed one gives an instance. The last instance of a pool never ends. A pool
that has lost its last instance counts as pressed without a bound, unless mixed instances do its work.

The role of a new instance is decided when its start is ordered. The instance gets it after its first report, whatever
its configuration says. If another instance comes back in the meantime, that one gets the role, because nothing tells
the two apart.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from actorserve.core.cluster.forecast import Demand, Forecast
from actorserve.core.cluster.scaled_pools import PoolInstances, Pressures, spread
from actorserve.core.effects import Effect, Send, StartWorker
from actorserve.core.messages import Drain, InstanceRole, Peer
from actorserve.core.placement.instance_view import InstanceView, NewInstance
from actorserve.core.pools.pressure import EASY, PoolPressure

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


class _Start(NamedTuple):
    """A start: when it was ordered, and the role that the new instance gets; None: as it is configured."""

    ordered_s: float
    role: InstanceRole | None


class _Lasting:
    """Since when a condition has held."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def note(self, holds: bool, now: float) -> None:
        if not holds:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now

    def for_s(self, hold_s: float, now: float) -> bool:
        """Whether it has held for so long."""
        return self._since_s is not None and now >= self._since_s + hold_s

    def forget(self) -> None:
        self._since_s = None


class Scaling:
    """Decides when an instance starts or ends."""

    def __init__(self, config: ScalingConfig, pressure: PoolPressure) -> None:
        self.mean_freeness: float | None = None  # in iterations, as predicted; None while there is no instance
        self.warm_up_s = 0.0  # how long the last start took, from the order to the first report
        self.config = config
        self.target: int | None = None  # how many instances an operator wants; None: as many as the load needs
        self._pressure = pressure
        self._forecast = Forecast()
        self._starting: deque[_Start] = deque()
        self._num_initial = config.num_initial  # how many of these instances have not reported yet
        self._initial_until_s: float | None = None  # how long they are waited for; None before the first round
        self._num_failures = 0  # starts that failed since one last succeeded
        self._has_failed = False  # whether a start has failed since the last round
        self._paused_until_s = -inf
        self._has_reported: dict[Peer, bool] = {}  # of each instance that is up
        self._tokens_short = _Lasting()
        self._tokens_ample = _Lasting()
        self._prompts_short = _Lasting()
        self._prompts_ample = _Lasting()
        self._too_few = _Lasting()

    def set_config(self, config: ScalingConfig) -> None:
        """Decide by these bounds from the next round on."""
        self.config = config

    @property
    def num_starting(self) -> int:
        return self._num_initial + len(self._starting)

    def on_up(self, peer: Peer) -> None:
        self._has_reported.setdefault(peer, False)

    def on_report(self, peer: Peer, now: float) -> InstanceRole | None:
        """The first report of an instance ends a start: an initial one if any is left, else the one ordered first.

        Returns the role that the instance was started for; None: it keeps its own.
        """
        if self._has_reported.get(peer) is not False:
            return None
        self._has_reported[peer] = True
        if self._num_initial:
            self._num_initial -= 1
        elif self._starting:
            start = self._starting.popleft()
            self.warm_up_s = now - start.ordered_s
            self._num_failures = 0
            self._has_failed = False
            self._paused_until_s = -inf
            return start.role
        return None

    def on_start_failed(self) -> None:
        """The start that was ordered last has failed. Another one may be ordered after a pause."""
        if self._starting:
            self._starting.pop()
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
        found = PoolInstances(present)
        self._sample(found, num_waiting, waiting_tokens, now)
        capacity_tokens = sum(map(_capacity_tokens, found.decoding), 0.0) / max(1, len(found.decoding))
        num_coming = self.num_starting - self._num_coming_prompts
        num_decoding = len(found.decoding) + num_coming
        self.mean_freeness = self._predict_freeness(capacity_tokens * num_decoding) if found.decoding else None
        pressures = self._pressures(found)
        self._note_bounds(found, pressures, count, now)
        if count < self._most and now >= self._paused_until_s and self._is_short(count, now):
            role = self._role_to_add(found, pressures, now)
            self._reset_bounds()
            self._starting.append(_Start(now, role))
            effects.append(StartWorker(role))
        elif count == len(present) == len(instances):  # no instance is starting or terminating
            terminating = self._to_end(found, pressures, count, capacity_tokens, now)
            if terminating is not None:
                self._reset_bounds()
                effects.append(Send(terminating.peer, Drain()))
                return effects, terminating
        return effects, None

    def validate(self) -> None:
        """Raises: AssertionError if the accounts of starts or the samples are out of bounds."""
        assert 0 <= self._num_initial <= self.config.num_initial, "the number of initial instances only falls"
        assert len(self._starting) <= self.config.max_workers, "no more starts are ordered than workers may run"
        ordered_s = [start.ordered_s for start in self._starting]
        assert ordered_s == sorted(ordered_s), "starts stand in the order in which they were ordered"
        self._forecast.validate()
        assert self._num_failures or not self._has_failed, "a failed start is counted"

    # --- starts ------------------------------------------------------------------------------------------------------

    def _give_up_late_starts(self, now: float) -> None:
        """Stop waiting for starts whose time is over, and pause if a start has failed."""
        if self._initial_until_s is None:
            self._initial_until_s = now + self.config.start_timeout_s
        if self._initial_until_s <= now:
            self._num_initial = 0
        while self._starting and self._starting[0].ordered_s + self.config.start_timeout_s <= now:
            self._starting.popleft()
            self._fail()
        if self._has_failed:
            self._has_failed = False
            pause_s = self.config.hold_s * 2.0 ** min(self._num_failures - 1, 30)
            self._paused_until_s = now + min(pause_s, MAX_PAUSE_S)

    def _fail(self) -> None:
        self._num_failures += 1
        self._has_failed = True

    @property
    def _num_coming_prompts(self) -> int:
        """How many prompt instances were ordered, and have not reported yet."""
        return sum([start.role is InstanceRole.PROMPT for start in self._starting])

    # --- the bounds --------------------------------------------------------------------------------------------------

    def _pressures(self, found: PoolInstances) -> Pressures:
        """How pressed the pools are, with the instances that are starting. Initial ones may be of either pool."""
        num_prompts = len(found.prompts) + self._num_coming_prompts + self._num_initial
        num_tokens = len(found.decoding) + self.num_starting - self._num_coming_prompts
        if not found.has_pools:
            return Pressures(0.0, 0.0, num_prompts, num_tokens)
        of_tokens = self._pressure.of_tokens(found.decoding, found.prompts) if found.decoding else 0.0
        prompts = 0.0
        if found.prompt_role is InstanceRole.PROMPT:
            prompts = spread(self._predict_prompt_instances(), num_prompts)
        return Pressures(prompts, spread(of_tokens * len(found.decoding), num_tokens), num_prompts, num_tokens)

    def _note_bounds(self, found: PoolInstances, pressures: Pressures, count: int, now: float) -> None:
        """Remember since when pools, or the number of instances, have been out of their bounds."""
        freeness, config = self.mean_freeness, self.config
        is_below = freeness is not None and freeness < config.scale_out_below
        self._tokens_short.note(is_below or pressures.tokens > 1.0, now)
        self._tokens_ample.note(freeness is not None and freeness > config.scale_in_above, now)
        self._prompts_short.note(pressures.prompts > 1.0, now)
        num_left = len(found.ending_prompts) - 1
        self._prompts_ample.note(num_left > 0 and self._predict_prompt_instances() / num_left <= EASY, now)
        self._too_few.note(count < config.min_workers, now)

    @property
    def _most(self) -> int:
        """How many instances may run."""
        return self.config.max_workers if self.target is None else self.target

    def _is_short(self, count: int, now: float) -> bool:
        """Whether a pool has been short, or instances too few, for long enough."""
        if self.target is not None:
            return count < self.target
        lasting = (self._tokens_short, self._prompts_short, self._too_few)
        return any(condition.for_s(self.config.hold_s, now) for condition in lasting)

    def _role_to_add(self, found: PoolInstances, pressures: Pressures, now: float) -> InstanceRole | None:
        """The role for one more instance: that of the pool that is short, or of the more pressed one."""
        if not found.has_pools:
            return None
        hold_s = self.config.hold_s
        for_prompts, for_tokens = self._prompts_short.for_s(hold_s, now), self._tokens_short.for_s(hold_s, now)
        if self.target is not None or for_prompts == for_tokens:
            for_prompts = pressures.is_more_on_prompts
        return found.prompt_role if for_prompts else found.token_role

    def _to_end(
        self, found: PoolInstances, pressures: Pressures, count: int, capacity_tokens: float, now: float
    ) -> InstanceView | None:
        """The instance that is to end, if one of ``count`` is too many. Each one that decodes has this capacity."""
        if count <= (self.config.min_workers if self.target is None else self.target):
            return None
        prompts, decoding = found.ending_prompts, found.ending_decoding
        if self.target is None:
            rest_s = max(self.config.hold_s, self.warm_up_s)
            if not self._prompts_ample.for_s(rest_s, now):
                prompts = []
            num_left = len(found.decoding) - 1
            is_free = (self._predict_freeness(capacity_tokens * num_left) or -inf) >= self.config.scale_out_below
            is_easy = pressures.tokens * len(found.decoding) <= EASY * num_left
            if not (self._tokens_ample.for_s(rest_s, now) and is_free and is_easy):
                decoding = []
        ending = prompts or decoding
        if prompts and decoding:
            ending = decoding if pressures.is_more_on_prompts else prompts
        return min(ending, key=lambda view: (_num_requests(view), view.peer)) if ending else None

    def _reset_bounds(self) -> None:
        """Forget how long a bound has been crossed, because the decision has to take effect first."""
        for condition in (
            self._tokens_short,
            self._tokens_ample,
            self._prompts_short,
            self._prompts_ample,
            self._too_few,
        ):
            condition.forget()

    # --- the forecast ------------------------------------------------------------------------------------------------

    def _sample(self, found: PoolInstances, num_waiting: int, waiting_tokens: int, now: float) -> None:
        """Sample the demand."""
        if not found.decoding and not found.prompts:
            self._forecast.clear()
            return
        num_tokens = waiting_tokens + sum(map(_demand_tokens, found.decoding), 0.0)
        num_requests = num_waiting + sum(map(_num_requests, found.decoding))
        num_prompt_instances = 0.0
        if found.prompts:
            num_prompt_instances = self._pressure.of_prompts(found.prompts, waiting_tokens, now) * len(found.prompts)
        demand = Demand(now, num_tokens, float(num_requests), num_prompt_instances)
        self._forecast.add(demand, max(self.config.hold_s, self.warm_up_s))

    def _predict_freeness(self, capacity_tokens: float) -> float | None:
        """The mean freeness now or when a start would be over, whichever is less, in a cluster of this capacity."""
        last = self._forecast.last
        if last is None:
            return None
        freeness = (capacity_tokens - last.num_tokens) / max(1.0, last.num_requests)
        then = self._demand_then()
        if then is None:
            return freeness
        return min(freeness, (capacity_tokens - then.num_tokens) / max(1.0, then.num_requests))

    def _predict_prompt_instances(self) -> float:
        """How many prompt instances are needed now or when a start would be over, whichever is more."""
        last, then = self._forecast.last, self._demand_then()
        now = 0.0 if last is None else last.num_prompt_instances
        return now if then is None else max(now, then.num_prompt_instances)

    def _demand_then(self) -> Demand | None:
        """The demand when a start would be over; None if it is not known."""
        return self._forecast.after(self.warm_up_s, self.config.hold_s / 2) if self.warm_up_s else None


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

"""What happened to a run's requests, in columns, and the figures computed from it."""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean
from typing import Any, Final

from actorserve.core.messages import FinishReason, LoadReport
from actorserve.core.migration.source import MigrationSource
from actorserve.sim.cluster_table import GroupTable
from actorserve.sim.config import SpikeTable
from actorserve.sim.instance_metrics import Gaps
from actorserve.sim.statistics import percentile

PERCENTILES: Final = (50, 90, 95, 99)
_WINDOW_S: Final = 2.0  # arrivals within this time form one window
_HOUR_S: Final = 3600.0
_WAITING, _COMPLETED, _REFUSED = 0, 1, 2


class Outcomes:
    """One row per request, numbered in the order of arrival; times in seconds of the virtual clock.

    Columns, because a million requests would not fit into memory as objects.
    """

    def __init__(self) -> None:
        self.arrived_s = array("d")
        self.first_token_s = array("d")
        self.ended_s = array("d")
        self.num_prompt = array("q")
        self.num_output = array("q")
        self.priority = array("q")
        self.num_preempted = array("q")
        self.preempted_s = array("d")  # time lost by preemptions (``sim.instance_metrics``)
        self._state = array("b")
        self.num_open = 0

    def __len__(self) -> int:
        return len(self.arrived_s)

    def arrive(self, at_s: float, num_prompt: int, num_output: int, priority: int) -> int:
        """A request has arrived. Returns its number."""
        self.arrived_s.append(at_s)
        self.first_token_s.append(math.nan)
        self.ended_s.append(math.nan)
        self.num_prompt.append(num_prompt)
        self.num_output.append(num_output)
        self.priority.append(priority)
        self.num_preempted.append(0)
        self.preempted_s.append(0.0)
        self._state.append(_WAITING)
        self.num_open += 1
        return len(self) - 1

    def end(self, number: int, now: float, reason: FinishReason) -> None:
        self.ended_s[number] = now
        self._state[number] = _COMPLETED if reason is FinishReason.LENGTH else _REFUSED
        self.num_open -= 1

    def completed(self, priority: int | None = None) -> list[int]:
        """Numbers of the requests that got their whole answer, in all classes or in one."""
        return [
            number
            for number, state in enumerate(self._state)
            if state == _COMPLETED and (priority is None or self.priority[number] == priority)
        ]

    def recovery_s(self, from_s: float, ttft_s: float) -> float | None:
        """How long after ``from_s`` the median TTFT is back within ``ttft_s`` for two windows of arrivals in a row.
        None if that does not happen.
        """
        windows: dict[int, list[float]] = {}
        for arrived_s, first_s in zip(self.arrived_s, self.first_token_s, strict=True):
            if arrived_s >= from_s:
                windows.setdefault(int((arrived_s - from_s) / _WINDOW_S), []).append(
                    math.inf if math.isnan(first_s) else first_s - arrived_s
                )
        is_back = {number: percentile(sorted(found), 50) <= ttft_s for number, found in windows.items()}
        numbers = sorted(is_back)
        for number, following in zip_longest(numbers, numbers[1:]):
            if is_back[number] and (following is None or is_back[following]):
                return number * _WINDOW_S
        return None

    def num_refused(self) -> int:
        return self._state.count(_REFUSED)

    def latencies(self, numbers: Sequence[int]) -> dict[str, dict[str, float] | None]:
        """TTFT, Llumnix's prefill latency; TPOT (time per output token after the first), its decode latency; E2E; E2E
        over all output tokens, which FastServe calls per-token latency; and the time lost by preemption, which is 0 for
        most requests.
        """
        arrived, first, ended, output = self.arrived_s, self.first_token_s, self.ended_s, self.num_output
        return {
            "ttft_s": summary([first[n] - arrived[n] for n in numbers]),
            "tpot_s": summary([(ended[n] - first[n]) / (output[n] - 1) for n in numbers if output[n] > 1]),
            "e2e_s": summary([ended[n] - arrived[n] for n in numbers]),
            "per_token_s": summary([(ended[n] - arrived[n]) / output[n] for n in numbers]),
            "preempted_s": summary([self.preempted_s[n] for n in numbers]),
        }


def summary(values: list[float]) -> dict[str, float] | None:
    """None if there are no values."""
    if not values:
        return None
    values.sort()
    figures = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    return {"mean": fmean(values), "max": values[-1], **figures}


@dataclass
class Counts:
    """The instances' counts, summed over all incarnations."""

    busy_s: float = 0.0
    num_steps: int = 0
    num_rows: int = 0
    num_preemptions: int = 0
    num_swap_outs: int = 0
    swapped_bytes: int = 0
    swap_blocked_s: float = 0.0
    num_tokens_looked_up: int = 0
    num_tokens_found: int = 0
    max_kv_used: float = 0.0
    num_migrated: int = 0
    num_migrations_failed: int = 0
    migrated_bytes: int = 0
    checkpointed_bytes: int = 0
    kv_used: list[float] = field(default_factory=list)  # one value per instance: the mean over its reports

    def add(self, report: LoadReport) -> None:
        """Add an instance's last report."""
        self.num_preemptions += report.num_preemptions
        self.num_swap_outs += report.num_swap_outs
        self.swapped_bytes += report.swapped_bytes
        self.swap_blocked_s += report.swap_blocked_s
        self.num_tokens_looked_up += report.num_tokens_looked_up
        self.num_tokens_found += report.num_tokens_found
        self.checkpointed_bytes += report.checkpointed_bytes

    def add_moves(self, migration_source: MigrationSource) -> None:
        """Add the migrations from an instance in its life."""
        self.num_migrated += migration_source.num_migrated
        self.num_migrations_failed += migration_source.num_failed
        self.migrated_bytes += migration_source.migrated_bytes


@dataclass(frozen=True)
class Results:
    """A finished run. ``lifetimes_s`` sums the lifetimes of each group's instances, each from its order to its end
    or the last request's end. ``fragmentation`` has samples at equal intervals while requests arrived.
    """

    outcomes: Outcomes
    counts: Counts
    num_failovers: int
    num_events: int
    lifetimes_s: Mapping[GroupTable, float]
    moved: Gaps = field(default_factory=Gaps)
    fragmentation: list[float] = field(default_factory=list)
    spike: SpikeTable | None = None

    def figures(self) -> dict[str, Any]:
        """Everything that is reported, as JSON values. They depend on the run alone."""
        outcomes, counts = self.outcomes, self.counts
        done = outcomes.completed()
        ends = [at for at in outcomes.ended_s if not math.isnan(at)]
        duration_s = max(ends) - outcomes.arrived_s[0] if ends else 0.0
        num_tokens = sum(outcomes.num_output[n] for n in done)
        e2e_s = math.fsum(outcomes.ended_s[n] - outcomes.arrived_s[n] for n in done)
        classes = sorted(set(outcomes.priority))
        lasted_s, spike = max(ends, default=0.0), self.spike
        alive_s = self.alive_s
        return {
            "requests": {
                "arrived": len(outcomes),
                "completed": len(done),
                "refused": outcomes.num_refused(),
                "unfinished": outcomes.num_open,
            },
            "duration_s": duration_s,
            "latency": outcomes.latencies(done),
            "classes": {
                str(priority): {"completed": len(numbers), "latency": outcomes.latencies(numbers)}
                for priority in (classes if len(classes) > 1 else ())
                for numbers in [outcomes.completed(priority)]
            },
            "throughput": {
                "requests_per_s": len(done) / duration_s if duration_s else 0.0,
                "output_tokens_per_s": num_tokens / duration_s if duration_s else 0.0,
            },
            "utilisation": {
                "busy": counts.busy_s / alive_s if alive_s else 0.0,
                "mean_batch_requests": counts.num_rows / counts.num_steps if counts.num_steps else 0.0,
                "kv_used_mean": fmean(counts.kv_used) if counts.kv_used else 0.0,
                "kv_used_max": counts.max_kv_used,
            },
            "steps": counts.num_steps,
            "preemptions": counts.num_preemptions,
            "preemption": {
                "requests_share": sum(outcomes.num_preempted[n] > 0 for n in done) / len(done) if done else 0.0,
                "share_of_e2e": math.fsum(outcomes.preempted_s[n] for n in done) / e2e_s if e2e_s else 0.0,
            },
            "fragmentation": summary(list(self.fragmentation)),
            "migration": {
                "migrated": counts.num_migrated,
                "failed": counts.num_migrations_failed,
                "bytes": counts.migrated_bytes,
                "gap_s": summary(list(self.moved.gaps_s)),
                "gap_steps": fmean(self.moved.gaps_s) / fmean(self.moved.usual_s) if self.moved.gaps_s else None,
            },
            "checkpoints": {"bytes": counts.checkpointed_bytes},
            "instances": {
                "seconds": alive_s,
                "mean": alive_s / lasted_s if lasted_s else 0.0,
                "cost": self._cost(),
                "mean_watts": self._mean_watts(lasted_s),
            },
            "recovery_s": spike and outcomes.recovery_s(spike.at_s + spike.duration_s, spike.ttft_s),
            "swap": {
                "outs": counts.num_swap_outs,
                "bytes": counts.swapped_bytes,
                "blocked_s": counts.swap_blocked_s,
                "blocked_share_of_e2e": counts.swap_blocked_s / e2e_s if e2e_s else 0.0,
            },
            "prefix_cache": {"looked_up": counts.num_tokens_looked_up, "found": counts.num_tokens_found},
            "failovers": self.num_failovers,
            "events": self.num_events,
        }

    @property
    def alive_s(self) -> float:
        """The lifetimes of all instances together: the run's cost, if they cost the same."""
        return math.fsum(self.lifetimes_s.values())

    def _cost(self) -> float | None:
        """The cost of all machines over the run; None if it is not known."""
        costs = [
            alive_s / _HOUR_S * group.cost_per_hour
            for group, alive_s in self.lifetimes_s.items()
            if group.cost_per_hour is not None
        ]
        return math.fsum(costs) if costs else None

    def _mean_watts(self, lasted_s: float) -> float | None:
        """The power of all machines together, averaged over the run; None if it is not known."""
        joules = [alive_s * group.watts for group, alive_s in self.lifetimes_s.items() if group.watts is not None]
        return math.fsum(joules) / lasted_s if joules and lasted_s else None

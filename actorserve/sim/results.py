"""What happened to a run's requests, in columns, and the figures computed from it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from actorserve.core.messages import FinishReason, LoadReport
from actorserve.core.migration.source import MigrationSource
from actorserve.sim.cluster_table import GroupTable
from actorserve.sim.config import SpikeTable
from actorserve.sim.instance_metrics import Gaps
from actorserve.sim.measures.distribution import Distribution
from actorserve.sim.measures.occupancy import Occupancy
from actorserve.sim.measures.rows import Column, Page, Rows
from actorserve.sim.measures.slowdown import ServiceLevels
from actorserve.sim.power.machine_power import MachineEnergy
from actorserve.sim.statistics import PERCENTILES, between_ranks

Vector: TypeAlias = npt.NDArray[Any]

_HOUR_S: Final = 3600.0
_WAITING, _COMPLETED, _REFUSED = 0, 1, 2
_ROW: Final = np.dtype(
    [
        ("arrived_s", "f8"),
        ("first_token_s", "f8"),
        ("ended_s", "f8"),
        ("preempted_s", "f8"),
        ("num_prompt", "i4"),
        ("num_output", "i4"),
        ("priority", "i4"),
        ("num_preempted", "i4"),
        ("state", "i1"),
    ]
)


class Outcomes:
    """One row per request, numbered in the order of arrival; times in seconds of the virtual clock.

    Ended requests move to a temporary file, because a run may have more of them than fit into memory.
    """

    def __init__(self) -> None:
        self._rows = Rows(_ROW)
        self.arrived_s: Column[float] = Column(self._rows, "arrived_s")
        self.first_token_s: Column[float] = Column(self._rows, "first_token_s")
        self.ended_s: Column[float] = Column(self._rows, "ended_s")
        self.num_prompt: Column[int] = Column(self._rows, "num_prompt")
        self.num_output: Column[int] = Column(self._rows, "num_output")
        self.priority: Column[int] = Column(self._rows, "priority")
        self.num_preempted: Column[int] = Column(self._rows, "num_preempted")
        self.preempted_s: Column[float] = Column(
            self._rows, "preempted_s"
        )  # time lost by preemptions (``sim.instance_metrics``)
        self._state: Column[int] = Column(self._rows, "state")
        self.num_open = 0

    def __len__(self) -> int:
        return len(self._rows)

    def arrive(self, at_s: float, num_prompt: int, num_output: int, priority: int) -> int:
        """A request has arrived. Returns its number."""
        self.num_open += 1
        return self._rows.append((at_s, math.nan, math.nan, 0.0, num_prompt, num_output, priority, 0, _WAITING))

    def end(self, number: int, now: float, reason: FinishReason) -> None:
        """Raises: SimulationError, if there is no room for the temporary file."""
        self.ended_s[number] = now
        self._state[number] = _COMPLETED if reason is FinishReason.LENGTH else _REFUSED
        self.num_open -= 1
        self._rows.close(number)

    def recovery_s(self, until_s: float) -> float | None:
        """How long after ``until_s`` all requests that had arrived by then have their first token.

        None if one of them never gets it. Requests that arrived later do not count, because a policy that serves them
        first would seem to recover sooner.
        """
        first_tokens_s = (
            first_s
            for arrived_s, first_s in zip(self.arrived_s, self.first_token_s, strict=True)
            if arrived_s <= until_s
        )
        last_s = until_s
        for first_s in first_tokens_s:
            if math.isnan(first_s):
                return None
            last_s = max(last_s, first_s)
        return last_s - until_s

    def num_refused(self) -> int:
        return sum(int((page["state"] == _REFUSED).sum()) for page in self._rows.pages())

    def classes(self) -> list[int]:
        """The priorities of the requests, each once."""
        return sorted({priority for page in self._rows.pages() for priority in np.unique(page["priority"]).tolist()})

    def num_completed(self, priority: int | None = None) -> int:
        """How many requests got their whole answer, in all classes or in one."""
        return sum(len(page) for page in self.completed(priority))

    def latencies(self, priority: int | None = None) -> dict[str, dict[str, float] | None]:
        """TTFT, Llumnix's prefill latency; TPOT (time per output token after the first), its decode latency; E2E; E2E
        over all output tokens, which FastServe calls per-token latency; and the time lost by preemption, which is 0 for
        most requests. Those of the completed requests of all classes or of one.
        """
        found: dict[str, dict[str, float] | None] = {}
        for name, values_of in _LATENCIES.items():
            parts = (values_of(page) for page in self.completed(priority))
            found[name] = summary(np.concatenate([np.empty(0), *parts]))
        return found

    def total(self, values_of: Callable[[Page], Vector]) -> float:
        """The sum of what ``values_of`` computes from the completed requests."""
        return math.fsum(value for page in self.completed() for value in values_of(page).tolist())

    def completed(self, priority: int | None = None) -> Iterator[Page]:
        """The requests that got their whole answer, in all classes or in one."""
        for page in self._rows.pages():
            is_chosen = page["state"] == _COMPLETED
            if priority is not None:
                is_chosen &= page["priority"] == priority
            yield page[is_chosen]


def time_to_end(page: Page) -> Vector:
    e2e_s: Vector = page["ended_s"] - page["arrived_s"]
    return e2e_s


def _tpot_s(page: Page) -> Vector:
    several = page[page["num_output"] > 1]
    tpot_s: Vector = (several["ended_s"] - several["first_token_s"]) / (several["num_output"] - 1)
    return tpot_s


_LATENCIES: Final[dict[str, Callable[[Page], Vector]]] = {
    "ttft_s": lambda page: page["first_token_s"] - page["arrived_s"],
    "tpot_s": _tpot_s,
    "e2e_s": time_to_end,
    "per_token_s": lambda page: time_to_end(page) / page["num_output"],
    "preempted_s": lambda page: page["preempted_s"],
}


def summary(values: Sequence[float] | Vector) -> dict[str, float] | None:
    """Mean, highest value and percentiles. None if there are no values."""
    if not len(values):
        return None
    in_order = np.sort(np.asarray(values, np.float64))
    percentiles = {f"p{percent}": between_ranks(in_order.item, len(in_order), percent) for percent in PERCENTILES}
    return {"mean": fmean(in_order), "max": float(in_order[-1]), **percentiles}


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
    ``tbt`` are the gaps between all tokens that were made, those of requests that did not complete included.
    ``occupancies`` and ``energies`` are of the time while requests arrived.
    """

    outcomes: Outcomes
    counts: Counts
    num_failovers: int
    num_events: int
    lifetimes_s: Mapping[GroupTable, float]
    moved: Gaps = field(default_factory=Gaps)
    fragmentation: Sequence[float] = ()
    spike: SpikeTable | None = None
    tbt: Distribution = field(default_factory=Distribution)
    occupancies: Mapping[GroupTable, Occupancy] = field(default_factory=dict)
    energies: Mapping[GroupTable, MachineEnergy] = field(default_factory=dict)

    def figures(self, levels: ServiceLevels | None = None) -> dict[str, Any]:
        """Everything that is reported, as JSON values. They depend on the run alone, and on the service levels, if it
        has any.
        """
        outcomes, counts = self.outcomes, self.counts
        num_done = outcomes.num_completed()
        lasted_s = max((at for at in outcomes.ended_s if not math.isnan(at)), default=0.0)
        duration_s = lasted_s - outcomes.arrived_s[0] if lasted_s else 0.0
        num_tokens = outcomes.total(lambda page: page["num_output"])
        num_preempted = outcomes.total(lambda page: page["num_preempted"] > 0)
        e2e_s, preempted_s = outcomes.total(time_to_end), outcomes.total(lambda page: page["preempted_s"])
        classes, spike = outcomes.classes(), self.spike
        alive_s = self.alive_s
        return {
            "requests": {
                "arrived": len(outcomes),
                "completed": num_done,
                "refused": outcomes.num_refused(),
                "unfinished": outcomes.num_open,
            },
            "duration_s": duration_s,
            "latency": {**outcomes.latencies(), "tbt_s": self.tbt.summary()},
            "classes": {
                str(priority): {
                    "completed": outcomes.num_completed(priority),
                    "latency": outcomes.latencies(priority),
                }
                for priority in (classes if len(classes) > 1 else ())
            },
            "throughput": {
                "requests_per_s": num_done / duration_s if duration_s else 0.0,
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
                "requests_share": num_preempted / num_done if num_done else 0.0,
                "share_of_e2e": preempted_s / e2e_s if e2e_s else 0.0,
            },
            "fragmentation": summary(self.fragmentation),
            "migration": {
                "migrated": counts.num_migrated,
                "failed": counts.num_migrations_failed,
                "bytes": counts.migrated_bytes,
                "gap_s": self.moved.gaps_s.summary(),
                "gap_steps": self.moved.gaps_s.mean / self.moved.usual_s.mean if self.moved.gaps_s.num_values else None,
            },
            "checkpoints": {"bytes": counts.checkpointed_bytes},
            "instances": {
                "seconds": alive_s,
                "mean": alive_s / lasted_s if lasted_s else 0.0,
                "cost": self._cost(),
                "mean_watts": self._mean_watts(lasted_s),
            },
            "occupancy": {group.name: occupancy.figures() for group, occupancy in self.occupancies.items()},
            "energy": self._energy(),
            "slo": levels and levels.figures(self.outcomes.completed()),
            "recovery_s": spike and outcomes.recovery_s(spike.at_s + spike.duration_s),
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

    def _energy(self) -> dict[str, Any] | None:
        """The figures of all machines, and of each group's; None if their power is not known."""
        if not self.energies:
            return None
        whole = MachineEnergy()
        for energy in self.energies.values():
            whole.add(energy)
        return whole.figures() | {"groups": {group.name: found.figures() for group, found in self.energies.items()}}

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

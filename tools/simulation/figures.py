"""Figures of a run: their names, which are dotted paths into ``Results.figures``, and their words and units."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

ROOTS: Final = (
    "classes",
    "energy",
    "failovers",
    "fragmentation",
    "instances",
    "latency",
    "migration",
    "occupancy",
    "preemption",
    "preemptions",
    "recovery_s",
    "requests",
    "slo",
    "swap",
    "throughput",
    "utilisation",
)
"""What a figure's name may begin with."""


@dataclass(frozen=True, slots=True)
class Label:
    """A figure's name for people. Values are shown in ``unit``, multiplied by ``scale``."""

    text: str
    unit: str = ""
    scale: float = 1.0

    @property
    def with_unit(self) -> str:
        return f"{self.text}, {self.unit}" if self.unit else self.text


_LATENCIES: Final = {
    "ttft_s": Label("prefill latency", "s"),
    "tpot_s": Label("decode latency", "ms", 1e3),
    "tbt_s": Label("time between tokens", "ms", 1e3),
    "e2e_s": Label("request latency", "s"),
    "per_token_s": Label("latency per token", "s"),
    "preempted_s": Label("preemption loss", "s"),
}
_OTHERS: Final = {
    "rate_per_s": Label("Requests/s"),
    "failovers": Label("Requests that lost their worker"),
    "energy.cap": Label("Mean cap, of full power", "%", 100.0),
    "energy.power": Label("Mean power, of full power", "%", 100.0),
    "energy.tokens_per_joule": Label("Output tokens per kJ", "", 1e3),
    "energy.tokens_per_allowed_joule": Label("Output tokens per kJ that the caps allow", "", 1e3),
    "fragmentation.mean": Label("Mean fragmented memory", "%", 100.0),
    "fragmentation.p99": Label("P99 fragmented memory", "%", 100.0),
    "instances.mean": Label("Mean number of instances"),
    "migration.migrated": Label("Migrations"),
    "migration.failed": Label("Failed migrations"),
    "migration.gap_s.mean": Label("Mean downtime of a migration", "ms", 1e3),
    "migration.gap_s.p50": Label("P50 downtime of a migration", "ms", 1e3),
    "migration.gap_s.p99": Label("P99 downtime of a migration", "ms", 1e3),
    "migration.gap_steps": Label("Downtime of a migration", "decode steps"),
    "preemption.requests_share": Label("Preempted requests", "%", 100.0),
    "occupancy": Label("Tokens of iterations over time"),
    "recovery_s": Label("Recovery after the spike", "s"),
    "requests.completed": Label("Completed requests"),
    "slo.growth.e2e": Label("E2E slowdown's growth", "x"),
    "slo.growth.ttft": Label("TTFT slowdown's growth", "x"),
    "slo.num_broken": Label("Limits broken"),
}
_CLASSES: Final = {"-1": "high priority", "0": "normal priority", "1": "low priority"}


def label_of(name: str, own: Mapping[str, str] | None = None) -> Label:
    """A figure's words and unit; ``own`` are an experiment's, and come first. A figure without words keeps its name."""
    known: Label = _OTHERS.get(name) or _patterned_label(name) or Label(name)
    return Label(own[name], known.unit, known.scale) if own and name in own else known


def _patterned_label(name: str) -> Label | None:
    match name.split("."):
        case ["energy", "groups", group, "cap"]:
            return Label(f"Mean cap of {group} machines", "%", 100.0)
        case ["slo", "slowdown", latency, statistic]:
            return Label(f"{statistic.upper()} {latency.upper()} slowdown", "x")
        case ["latency", latency, statistic] if latency in _LATENCIES:
            kind = _LATENCIES[latency]
            return Label(f"{'Mean' if statistic == 'mean' else statistic.upper()} {kind.text}", kind.unit, kind.scale)
        case ["classes", priority, *rest] if (label := _patterned_label(".".join(rest))) is not None:
            which = _CLASSES.get(priority, f"priority {priority}")
            return Label(f"{label.text}, {which}", label.unit, label.scale)
    return None


def figure_of(run: dict[str, Any], name: str) -> float | None:
    """None if the run has no such figure: for example, no request migrated."""
    found: Any = run
    for part in name.split("."):
        if not isinstance(found, dict) or part not in found:
            return None
        found = found[part]
    return float(found) if isinstance(found, int | float) else None


def scaled_figure(run: dict[str, Any], name: str) -> float | None:
    """The figure in its label's unit."""
    value = figure_of(run, name)
    return None if value is None else value * label_of(name).scale


def labels_of(tables: Any) -> dict[str, str]:
    """The labels of arms or variants by name; without a ``label`` it is the name."""
    return {"": ""} | {table["name"]: table.get("label", table["name"]) for table in tables}

"""The three tables: schedule, profile, and end to end. Every cell is a ratio, and the median of the rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from actorserve.core.messages import LoadReport
from actorserve.core.timing.profile import Profile
from actorserve.sim.results import Counts, summary
from tools.benchmarks.common.console import print_table
from tools.benchmarks.common.journals import Record
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.journals.steps import Kind, RecordedStep

SCHEDULE = "Schedule: simulated with recorded arrivals and recorded times of iterations / measured"
PROFILE = "Profile: predicted / actual time of iterations"
END_TO_END = "End to end: simulated with a profile that was calibrated before / measured"
_LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E"}
_PERCENTILES = ("p50", "p99")
_COUNTS = {"num_preemptions": "preemptions", "num_tokens_found": "tokens from the prefix cache"}

Latencies = dict[str, dict[str, float]]
"""Percentiles of each latency."""


def latencies_of(records: Sequence[Record]) -> Latencies:
    """TPOT is the mean time per output token after the first."""
    values = {
        "ttft_s": [record.first_token_s - record.arrived_s for record in records],
        "tpot_s": [
            (record.ended_s - record.first_token_s) / (record.num_output - 1)
            for record in records
            if record.num_output > 1
        ],
        "e2e_s": [record.ended_s - record.arrived_s for record in records],
    }
    return {name: found for name, times_s in values.items() if (found := summary(times_s)) is not None}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run on both sides."""

    measured: Latencies
    simulated: Latencies
    measured_counts: Mapping[str, int]
    simulated_counts: Mapping[str, int]

    def ratio(self, name: str, percentile: str) -> float:
        """Simulated over measured."""
        return self.simulated[name][percentile] / self.measured[name][percentile]


def compare(measured: Sequence[Record], report: LoadReport, simulated: Sequence[Record], counts: Counts) -> Comparison:
    return Comparison(
        latencies_of(measured),
        latencies_of(simulated),
        {name: getattr(report, name) for name in _COUNTS},
        {name: getattr(counts, name) for name in _COUNTS},
    )


def latency_table(title: str, by_load: Mapping[float, Sequence[Comparison]]) -> FigureTable:
    """A row for each load, with a comparison for each round."""
    columns = [Column(f"{name} {key.upper()}", "x", 2) for name in _LATENCIES.values() for key in _PERCENTILES]
    for name in _COUNTS.values():
        columns += [Column(f"{name}, simulated", decimals=0), Column(f"{name}, measured", decimals=0)]
    rows = []
    for load, rounds in by_load.items():
        cells = [Figure.of([each.ratio(name, key) for each in rounds]) for name in _LATENCIES for key in _PERCENTILES]
        for name in _COUNTS:
            cells += [Figure.of([each.simulated_counts[name] for each in rounds])]
            cells += [Figure.of([each.measured_counts[name] for each in rounds])]
        rows.append(Row(f"{100 * load:.0f} % of saturation", tuple(cells)))
    return FigureTable(title, "load", tuple(columns), tuple(rows))


@dataclass(frozen=True, slots=True)
class KindRatios:
    """Predicted over actual time of one kind of iteration, medians over ``num_steps``: by a profile as it was measured,
    and by the same one calibrated by another run.
    """

    measured: float
    calibrated: float
    num_steps: int


def kind_ratios(measured: Profile, calibrated: Profile, steps: Sequence[RecordedStep]) -> dict[Kind, KindRatios]:
    """For each kind that occurs."""
    groups: dict[Kind, list[RecordedStep]] = {}
    for step in steps:
        groups.setdefault(step.work.kind, []).append(step)

    def ratio(profile: Profile, group: Sequence[RecordedStep]) -> float:
        return median(step.work.predicted_s(profile) / step.duration_s for step in group)

    return {
        kind: KindRatios(ratio(measured, group), ratio(calibrated, group), len(group)) for kind, group in groups.items()
    }


def profile_table(rounds: Sequence[Mapping[Kind, KindRatios]]) -> FigureTable:
    """A row for each kind of iteration; ``rounds`` as from ``kind_ratios``."""
    rows = []
    for kind in Kind:
        found = [each[kind] for each in rounds if kind in each]
        if found:
            cells = (
                Figure.of([each.measured for each in found]),
                Figure.of([each.calibrated for each in found]),
                Figure.of([each.num_steps for each in found]),
            )
            rows.append(Row(kind.value, cells))
    names = (Column("measured alone", "x", 2), Column("calibrated", "x", 2), Column("iterations", decimals=0))
    return FigureTable(PROFILE, "iteration", names, tuple(rows))


def show(table: FigureTable, console: Console) -> None:
    """Medians, with the lowest and the highest of the rounds. The table's rows are columns, which fits a terminal."""
    shown = Table(table.corner, *(row.name for row in table.rows), title=table.title, title_justify="left")
    for place, column in enumerate(table.columns):
        shown.add_row(column.name, *(_cell(row.cells[place], column) for row in table.rows))
    print_table(console, shown)


def _cell(figure: Figure | None, column: Column) -> str:
    if figure is None:
        return ""
    text = f"{figure.median:,.{column.decimals}f}"
    if column.unit and figure.spread:
        text += f" ({figure.min:.{column.decimals}f}-{figure.max:.{column.decimals}f})"
    return text


def details_of(comparison: Comparison) -> dict[str, Any]:
    """For the figure file."""
    return {
        "measured": comparison.measured,
        "simulated": comparison.simulated,
        "measured_counts": dict(comparison.measured_counts),
        "simulated_counts": dict(comparison.simulated_counts),
    }

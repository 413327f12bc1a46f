"""A report of one run against a server: for a person, and as figures."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.serving.statistics import PERCENTILES, Report, Summary
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import Machine, machine_line

TITLE = "Latencies and throughput of a server"
_TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}


def details_of(report: Report, workload: Mapping[str, Any]) -> dict[str, Any]:
    """All figures, with units in their names; a latency that no request has is null."""
    fields = asdict(report)
    for name, summary in report.latencies_s.items():
        fields["latencies_s"][name] = summary and {
            "count": summary.count,
            "mean": summary.mean,
            **{f"p{percent}": value for percent, value in summary.percentiles.items()},
        }
    return {"workload": dict(workload), "result": fields}


def table_of(report: Report) -> FigureTable:
    """Latencies, and the rates as a row of their own under the mean."""
    columns = (Column("mean"), *(Column(f"P{percent}") for percent in PERCENTILES))
    rows = [Row(_TITLES[name], _cells(summary), "ms") for name, summary in report.latencies_s.items()]
    rates = (("output", report.output_tokens_per_s, "tokens/s"), ("requests", report.requests_per_s, "requests/s"))
    rows += [Row(name, (Figure(rate, rounds=1), *(None for _ in PERCENTILES)), unit) for name, rate, unit in rates]
    return FigureTable(TITLE, "", columns, tuple(rows))


def _cells(summary: Summary | None) -> tuple[Figure | None, ...]:
    if summary is None:
        return (None,) * (1 + len(PERCENTILES))
    return tuple(Figure(1e3 * value, rounds=1) for value in (summary.mean, *summary.percentiles.values()))


def show(report: Report, machine: Machine, workload: dict[str, Any], console: Console) -> None:
    """Print for a person."""
    say(console, f"{workload['model']} at {workload['url']}")
    say(console, f"client's CPU: {machine_line(machine)}")
    ended = f"{report.num_completed} of {report.num_requests} requests completed in {report.duration_s:.1f} s"
    unfinished = f", {report.num_unfinished} were still running" if report.num_unfinished else ""
    say(console, ended + unfinished)
    table = Table("ms", "mean", *(f"P{percent}" for percent in PERCENTILES))
    for name, summary in report.latencies_s.items():
        values = [summary.mean, *summary.percentiles.values()] if summary else [None] * (len(PERCENTILES) + 1)
        table.add_row(_TITLES[name], *("-" if value is None else f"{value * 1e3:.1f}" for value in values))
    print_table(console, table)
    say(
        console,
        f"{report.requests_per_s:.2f} requests/s, {report.output_tokens_per_s:.1f} output tokens/s, "
        f"{report.total_tokens_per_s:.1f} tokens/s with prompts "
        f"({report.prompt_tokens} prompt and {report.output_tokens} output tokens)",
    )
    for kind, count in report.errors.items():
        say(console, f"error: {count} x {kind}")

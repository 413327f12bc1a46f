"""A report for a person, and the same as JSON."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.benchmarks.errors import BenchError
from tools.benchmarks.machine import Machine, machine_line
from tools.benchmarks.statistics import PERCENTILES, Report

_TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}


def as_json(report: Report, machine: Machine, workload: dict[str, Any]) -> dict[str, Any]:
    """Everything, with units in the names; figures that nothing went into are null."""
    fields = asdict(report)
    for name, summary in report.latencies_s.items():
        fields["latencies_s"][name] = summary and {
            "count": summary.count,
            "mean": summary.mean,
            **{f"p{percent}": value for percent, value in summary.percentiles.items()},
        }
    return {"machine": asdict(machine), "workload": workload, "result": fields}


def show(report: Report, machine: Machine, workload: dict[str, Any], console: Console) -> None:
    """Print for a person."""
    console.print(f"{workload['model']} at {workload['url']}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"client's CPU: {machine_line(machine)}", markup=False, highlight=False, soft_wrap=True)
    ended = f"{report.num_completed} of {report.num_requests} requests completed in {report.duration_s:.1f} s"
    unfinished = f", {report.num_unfinished} were still running" if report.num_unfinished else ""
    console.print(ended + unfinished, highlight=False, soft_wrap=True)
    table = Table("ms", "mean", *(f"P{percent}" for percent in PERCENTILES))
    for name in table.columns[1:]:
        name.justify = "right"
    for name_, summary in report.latencies_s.items():
        values = [summary.mean, *summary.percentiles.values()] if summary else [None] * (len(PERCENTILES) + 1)
        table.add_row(_TITLES[name_], *("-" if value is None else f"{value * 1e3:.1f}" for value in values))
    console.print(table)
    console.print(
        f"{report.requests_per_s:.2f} requests/s, {report.output_tokens_per_s:.1f} output tokens/s, "
        f"{report.total_tokens_per_s:.1f} tokens/s with prompts "
        f"({report.prompt_tokens} prompt and {report.output_tokens} output tokens)",
        highlight=False,
        soft_wrap=True,
    )
    for kind, count in report.errors.items():
        console.print(f"error: {count} x {kind}", markup=False, highlight=False, soft_wrap=True)


def write_json(figures: dict[str, Any], file: Path) -> None:
    """Raises: BenchError."""
    try:
        file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot write {file}: {error.strerror}") from None

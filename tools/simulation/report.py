"""An experiment's results as a table on the terminal and as JSON."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.simulation.experiment import Experiment
from tools.simulation.figures import figure_of
from tools.simulation.runner import CaseResult

JSON_NAME = "metrics.json"


def as_values(experiment: Experiment, results: list[CaseResult]) -> dict[str, Any]:
    """Everything as JSON values. They depend on the configuration alone, not on the clock or the machine."""
    goals = experiment.plan.search.goals if experiment.plan.search is not None else ()
    values: dict[str, Any] = {"name": experiment.name, "config": experiment.values, "cases": []}
    for case, result in zip(experiment.cases, results, strict=True):
        values["cases"].append(
            {
                "variant": case.variant,
                "arm": case.arm,
                "x": case.x,
                "runs": [{"rate_per_s": rate, **figures} for rate, figures in result.runs.items()],
                "held": {
                    f"{goal.metric} <= {goal.limit:g}": rate for goal, rate in zip(goals, result.held, strict=False)
                },
            }
        )
    return values


def as_json(values: dict[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, indent=1, allow_nan=True) + "\n"


def write_json(values: dict[str, Any], folder: Path) -> Path:
    """Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / JSON_NAME
    file.write_text(as_json(values), encoding="utf-8")
    return file


def show(values: dict[str, Any], console: Console) -> None:
    """Show the rates that were held, compared with the best, and every run's main figures."""
    for case in values["cases"]:
        if case["held"]:
            _show_held(values, console)
            break
    table = Table("run", title="Means in seconds")
    for column in ("rate/s", "requests", "TTFT", "TPOT", "E2E", "s/token", "P95", "busy", "preempted", "swapped GB"):
        table.add_column(column, justify="right")
    table.add_column("blocked", justify="right")
    for case in values["cases"]:
        for run in case["runs"]:
            table.add_row(" ".join((case["variant"], case["arm"])).strip(), *_row(run))
    console.print(table)
    if values["config"].get("figures"):
        _show_figures(values, values["config"]["figures"], console)


def _show_figures(values: dict[str, Any], names: list[str], console: Console) -> None:
    """Show each figure with its ratio to the variant's last arm, at the same rate."""
    table = Table("run", "rate/s", *names, title="Figures, and their ratio to the last arm's")
    last = {case["variant"]: case for case in values["cases"]}
    for case in values["cases"]:
        others = {run["rate_per_s"]: run for run in last[case["variant"]]["runs"]}
        for run in case["runs"]:
            rate = run["rate_per_s"]
            cells = []
            for name in names:
                found, other = figure_of(run, name), figure_of(others.get(rate, {}), name)
                times = (
                    f" ({found / other:.3g}x)"
                    if found is not None and other and last[case["variant"]] is not case
                    else ""
                )
                cells.append("none" if found is None else f"{found:.3g}{times}")
            shown = " ".join((case["variant"], case["arm"])).strip()
            table.add_row(shown, "" if rate is None else f"{rate:.3g}", *cells)
    console.print(table)


def _row(run: dict[str, Any]) -> list[str]:
    requests, latency = run["requests"], run["latency"]
    done = str(requests["completed"])
    if requests["completed"] < requests["arrived"]:
        done += f" of {requests['arrived']}"
    figures = [latency[name]["mean"] if latency[name] else float("nan") for name in ("ttft_s", "tpot_s", "e2e_s")]
    per_token = latency["per_token_s"] or {"mean": float("nan"), "p95": float("nan")}
    return [
        f"{run['rate_per_s']:.3g}" if run["rate_per_s"] is not None else "",
        done,
        *(f"{figure:.3g}" for figure in figures),
        f"{per_token['mean']:.3g}",
        f"{per_token['p95']:.3g}",
        f"{run['utilisation']['busy']:.0%}",
        str(run["preemptions"]),
        f"{run['swap']['bytes'] / 1e9:.1f}",
        f"{run['swap']['blocked_share_of_e2e']:.1%}",
    ]


def _show_held(values: dict[str, Any], console: Console) -> None:
    goals = list(values["cases"][0]["held"])
    table = Table("variant", "arm", *(f"held at {goal}" for goal in goals), title="Highest rate (requests/s)")
    variants: dict[str, list[dict[str, Any]]] = {}
    for case in values["cases"]:
        variants.setdefault(case["variant"], []).append(case)
    for variant, cases in variants.items():
        for case in cases:
            cells = []
            for goal in goals:
                rate, best = case["held"][goal], max(other_case["held"][goal] or 0.0 for other_case in cases)
                cells.append("none" if rate is None else f"{rate:.3g} ({rate / best:.0%} of the best)")
            table.add_row(variant, case["arm"], *cells)
    console.print(table)

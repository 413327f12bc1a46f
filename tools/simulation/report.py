"""An experiment's results as tables on the terminal."""

from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from tools.figures.figure import Figure
from tools.simulation.arms import ArmRuns, arms_of, medians_over_seeds
from tools.simulation.figures import figure_of

LATENCIES: Final = (
    ("ttft_s", "TTFT", "s", 1.0),
    ("tpot_s", "TPOT", "ms", 1e3),
    ("tbt_s", "TBT", "ms", 1e3),
    ("e2e_s", "E2E", "s", 1.0),
    ("per_token_s", "E2E/token", "ms", 1e3),
)
"""Of each latency its name in results, its name for people, its unit, and the unit's factor."""

_MACHINES: Final = (("instances.cost", "cost", 1.0), ("instances.mean_watts", "kW on average", 1e-3))
"""Figures that a run has if the experiment tells what machines cost or consume: the name in results, the name for
people, and the factor.
"""

SHOWN_PERCENTILES: Final = ("p50", "p90", "p99")

WHICH_IS_WHICH: Final = (
    "TTFT: time to the first token. TPOT: a request's mean time per token after the first. TBT: the time between two "
    "tokens, over all tokens of all requests. E2E: the whole time; E2E/token: that time per output token."
)


def show(values: dict[str, Any], console: Console) -> None:
    """Show the rates that were held, compared with the best, and every run's main figures."""
    cases = values["cases"]
    if any(case["held"] for case in cases):
        _show_held(cases, values["config"]["search"]["low"], console)
    _show_runs(arms_of(cases), console)
    if values["config"].get("figures"):
        _show_figures(cases, values["config"]["figures"], console)


def _show_runs(arms: Sequence[ArmRuns], console: Console) -> None:
    num_seeds = max(len(arm.cases) for arm in arms)
    caption = WHICH_IS_WHICH
    if num_seeds > 1:
        caption += (
            f" Medians of {num_seeds} seeds, if not said otherwise; in brackets, highest less lowest over the median."
        )
    table = Table(title="Runs", caption=caption, caption_justify="left", show_lines=True)
    table.add_column("run", max_width=24)
    table.add_column("requests, instances", no_wrap=True)
    for column in ("latency", *(percentile.upper() for percentile in SHOWN_PERCENTILES)):
        table.add_column(column, no_wrap=True, justify="left" if column == "latency" else "right")
    for arm in arms:
        for rate in arm.rates():
            names = [f"{name}, {unit}" for _, name, unit, _ in LATENCIES]
            percentiles = [
                "\n".join(_cell(arm, rate, f"latency.{name}.{percentile}", scale) for name, _, _, scale in LATENCIES)
                for percentile in SHOWN_PERCENTILES
            ]
            table.add_row(_run_name(arm, rate), "\n".join(_counts(arm, rate)), "\n".join(names), *percentiles)
    console.print(table)


def _run_name(arm: ArmRuns, rate_per_s: float | None) -> str:
    """It tells how many seeds ran at this rate if not all did."""
    name = arm.name if rate_per_s is None else f"{arm.name}\nat {rate_per_s:.3g}/s".strip()
    num_runs, num_seeds = len(arm.runs(rate_per_s)), len(arm.cases)
    return name if num_runs == num_seeds else f"{name}\n{num_runs} of {num_seeds} seeds"


def _cell(arm: ArmRuns, rate_per_s: float | None, name: str, scale: float = 1.0) -> str:
    """A figure, with the spread over the seeds if there are several."""
    values = arm.values(rate_per_s, name)
    if not values:
        return "none"
    figure = Figure.of([value * scale for value in values])
    spread = "" if len(values) == 1 or figure.spread is None else f" ({percent(figure.spread)})"
    return f"{figure.median:.3g}{spread}"


def percent(share: float) -> str:
    """In two digits, as 16% and 5.7%."""
    return f"{100.0 * share:.2g}%" if share < 1.0 else f"{share:.0%}"


def _counts(arm: ArmRuns, rate_per_s: float | None) -> list[str]:
    """What the instances did."""

    def middle(name: str) -> float:
        return median(arm.values(rate_per_s, name) or [0.0])

    done, arrived = middle("requests.completed"), middle("requests.arrived")
    served = f"{done:.0f} completed" + (f" of {arrived:.0f}" if done < arrived else "")
    blocked = middle("swap.blocked_share_of_e2e")
    return [
        served,
        f"{_cell(arm, rate_per_s, 'throughput.output_tokens_per_s')} tokens/s",
        f"{middle('utilisation.busy'):.0%} busy",
        f"{middle('preemptions'):.0f} preempted",
        f"{middle('swap.bytes') / 1e9:.1f} GB swapped" + (f", {blocked:.1%} blocked" if blocked else ""),
        *(
            f"{_cell(arm, rate_per_s, name, scale)} {unit}"
            for name, unit, scale in _MACHINES
            if arm.values(rate_per_s, name)
        ),
    ]


def _over_seeds(cases: Sequence[dict[str, Any]]) -> str:
    num_seeds = max(len(arm.cases) for arm in arms_of(cases))
    return f", medians of {num_seeds} seeds" if num_seeds > 1 else ""


def _show_figures(cases: list[dict[str, Any]], names: list[str], console: Console) -> None:
    """Show each figure with its ratio to the variant's last arm, at the same rate."""
    title = f"Figures{_over_seeds(cases)}, and their ratio to the last arm's"
    table = Table("run", "rate/s", *names, title=title)
    middle = medians_over_seeds(cases)
    last = {case["variant"]: case for case in middle}
    for case in middle:
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


def _show_held(cases: list[dict[str, Any]], lowest: float, console: Console) -> None:
    """``lowest``: the lowest rate that the search tried."""
    goals = list(cases[0]["held"])
    title = f"Highest rate (requests/s{_over_seeds(cases)})"
    table = Table("variant", "arm", *(f"held at {goal}" for goal in goals), title=title)
    variants: dict[str, list[dict[str, Any]]] = {}
    for case in medians_over_seeds(cases):
        variants.setdefault(case["variant"], []).append(case)
    for variant, found in variants.items():
        for case in found:
            cells = []
            for goal in goals:
                rate, best = case["held"][goal], max(other_case["held"][goal] or 0.0 for other_case in found)
                cells.append(f"under {lowest:.3g}" if rate is None else f"{rate:.3g} ({rate / best:.0%} of the best)")
            table.add_row(variant, case["arm"], *cells)
    console.print(table)

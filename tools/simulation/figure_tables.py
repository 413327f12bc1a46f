"""An experiment's results as figure tables, as ``--json`` writes them and READMEs show them."""

from typing import Any

from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.simulation.figures import figure_of, label_of, labels_of, scaled_figure
from tools.simulation.plots import DEFAULT_FIGURES

HELD = "Highest request rate that holds the goal"
SPEED = "Speed of the simulator, one core for each arm"


def tables_of(values: dict[str, Any], num_requests: int, took_s: float) -> list[FigureTable]:
    """The rates that were held, the figures of all runs, or, if the experiment names neither, the simulator's speed."""
    config, cases = values["config"], values["cases"]
    tables = []
    if any(case["held"] for case in cases):
        tables.append(_held(config, cases))
    if all(case["x"] is not None for case in cases) and "plot_by" not in config:
        tables += [_by_x(config, cases, name) for name in config.get("figures") or DEFAULT_FIGURES]
    elif config.get("figures"):
        tables.append(_figures(config, cases, config["figures"]))
    return tables or [_speed(values["name"], num_requests, took_s)]


def _name(config: dict[str, Any], case: dict[str, Any]) -> str:
    variant = labels_of(config.get("variants", ()))[case["variant"]]
    arm = labels_of(config.get("arms", ()))[case["arm"]]
    return ", ".join(part for part in (variant, arm) if part)


def _held(config: dict[str, Any], cases: list[dict[str, Any]]) -> FigureTable:
    """A search that holds even its highest rate finds a lower bound."""
    columns = []
    for goal in config["search"]["goals"]:
        label = label_of(f"latency.{goal['metric']}")
        limit = f"{goal['limit'] * label.scale:g} {label.unit}"
        columns.append(Column(f"{label.text} at most {limit}", "requests/s"))
    highest = config["search"]["high"]
    step = config["search"].get("step", 1.05)
    rows = [
        Row(
            _name(config, case),
            tuple(
                None if rate is None else Figure(rate, rounds=1, is_lower_bound=rate * step > highest)
                for rate in case["held"].values()
            ),
        )
        for case in cases
    ]
    return FigureTable(HELD, "arm", tuple(columns), tuple(rows))


def _by_x(config: dict[str, Any], cases: list[dict[str, Any]], name: str) -> FigureTable:
    """A row for each arm, a column for each x."""
    label = label_of(name, config.get("labels"))
    positions = sorted({case["x"] for case in cases})
    arms = labels_of(config.get("arms", ()))
    rows = []
    for arm in dict.fromkeys(case["arm"] for case in cases):
        runs = {case["x"]: case["runs"][0] for case in cases if case["arm"] == arm}
        cells = (scaled_figure(runs[x], name) if x in runs else None for x in positions)
        rows.append(Row(arms[arm], tuple(Figure.single(value, rounds=1) for value in cells)))
    columns = tuple(Column(f"{x:g}") for x in positions)
    return FigureTable(f"{label.with_unit}, by {config.get('title') or 'variant'}", "arm", columns, tuple(rows))


def _figures(config: dict[str, Any], cases: list[dict[str, Any]], names: list[str]) -> FigureTable:
    labels = [label_of(name, config.get("labels")) for name in names]
    rows = []
    for case in cases:
        for run in case["runs"]:
            rate = "" if len(case["runs"]) == 1 else f", {figure_of(run, 'rate_per_s'):g}/s"
            cells = (Figure.single(scaled_figure(run, name), rounds=1) for name in names)
            rows.append(Row(_name(config, case) + rate, tuple(cells)))
    return FigureTable(
        "Figures of each run", "run", tuple(Column(label.text, label.unit) for label in labels), tuple(rows)
    )


def _speed(name: str, num_requests: int, took_s: float) -> FigureTable:
    columns = (Column("requests", decimals=0), Column("simulated", "requests/s", 0))
    row = Row(name, (Figure(num_requests, rounds=1), Figure(num_requests / took_s, rounds=1)))
    return FigureTable(SPEED, "experiment", columns, (row,))

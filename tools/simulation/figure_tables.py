"""An experiment's results as figure tables, as ``--json`` writes them and READMEs show them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.simulation.arms import ArmRuns, arms_of
from tools.simulation.experiment import SLO, Search
from tools.simulation.figures import label_of, labels_of
from tools.simulation.plots import DEFAULT_FIGURES, OCCUPANCY

HELD = "Highest request rate that holds the goal"
SPEED = "Speed of the simulator, one core for each arm"


def tables_of(values: dict[str, Any], num_requests: int, took_s: float) -> list[FigureTable]:
    """The rates that were held, the figures of all runs, or, if the experiment names neither, the simulator's speed."""
    config, arms = values["config"], arms_of(values["cases"])
    tables = []
    if any(case["held"] for case in values["cases"]):
        tables.append(_held(config, arms))
    if all(arm.x is not None for arm in arms) and "plot_by" not in config:
        tables += [_by_x(config, arms, name) for name in config.get("figures") or DEFAULT_FIGURES]
    elif config.get("figures"):
        tables.append(_figures(config, arms, config["figures"]))
    if config.get("plot_by") == OCCUPANCY:
        tables.append(_occupancy(config, arms))
    return tables or [_speed(values["name"], num_requests, took_s)]


def _name(config: dict[str, Any], arm: ArmRuns) -> str:
    variant = labels_of(config.get("variants", ()))[arm.variant]
    label = labels_of(config.get("arms", ()))[arm.arm]
    return ", ".join(part for part in (variant, label) if part)


def _figure(values: Sequence[float]) -> Figure | None:
    """The figure of one value for each seed. One seed has no spread that is worth telling."""
    if len(values) > 1:
        return Figure.of(values)
    return Figure.single(values[0] if values else None, rounds=1)


def _held(config: dict[str, Any], arms: list[ArmRuns]) -> FigureTable:
    """A search that holds even its highest rate finds a lower bound; one that holds not even its lowest rate finds an
    upper bound.
    """
    columns = []
    for goal in config["search"]["goals"]:
        if goal["metric"] == SLO:
            columns.append(Column("All limits of the service levels hold", "requests/s"))
            continue
        label = label_of(f"latency.{goal['metric']}")
        limit = f"{goal['limit'] * label.scale:g} {label.unit}"
        columns.append(Column(f"{label.text} at most {limit}", "requests/s"))
    rows = [
        Row(_name(config, arm), tuple(_held_rate(config["search"], arm, goal) for goal in arm.cases[0]["held"]))
        for arm in arms
    ]
    return FigureTable(HELD, "arm", tuple(columns), tuple(rows))


def _held_rate(search: dict[str, Any], arm: ArmRuns, goal: str) -> Figure:
    """The median over the seeds. Its spread is unknown if a seed holds no rate."""
    rates, middle = [case["held"][goal] for case in arm.cases], arm.held(goal)
    if middle is None:
        return Figure(search["low"], rounds=len(rates), is_upper_bound=True)
    num_rounds = max(len(rates), 1 + len(search.get("edge_seeds", ())))
    figure = Figure(middle, rounds=num_rounds)
    if len(rates) > 1 and None not in rates:
        figure = Figure.of(rates)
    return replace(figure, is_lower_bound=Search.model_validate(search).is_highest(middle))


def _by_x(config: dict[str, Any], arms: list[ArmRuns], name: str) -> FigureTable:
    """A row for each arm, a column for each x."""
    label = label_of(name, config.get("labels"))
    positions = sorted({arm.x for arm in arms if arm.x is not None})
    labels = labels_of(config.get("arms", ()))
    rows = []
    for arm_name in dict.fromkeys(arm.arm for arm in arms):
        by_x = {arm.x: arm for arm in arms if arm.arm == arm_name}
        cells = (_figure(_scaled(by_x[x], by_x[x].rates()[0], name) if x in by_x else []) for x in positions)
        rows.append(Row(labels[arm_name], tuple(cells)))
    columns = tuple(Column(f"{x:g}") for x in positions)
    return FigureTable(f"{label.with_unit}, by {config.get('title') or 'variant'}", "arm", columns, tuple(rows))


def _figures(config: dict[str, Any], arms: list[ArmRuns], names: list[str]) -> FigureTable:
    labels = [label_of(name, config.get("labels")) for name in names]
    rows = []
    for arm in arms:
        for rate in arm.rates():
            place = "" if len(arm.rates()) == 1 else f", {rate:g}/s"
            cells = (_figure(_scaled(arm, rate, name)) for name in names)
            rows.append(Row(_name(config, arm) + place, tuple(cells)))
    return FigureTable(
        "Figures of each run", "run", tuple(Column(label.text, label.unit) for label in labels), tuple(rows)
    )


def _occupancy(config: dict[str, Any], arms: list[ArmRuns]) -> FigureTable:
    """A row for each arm's group of machines, at each rate."""
    figures = {
        "busy": Column("time with an iteration", "%", 1),
        "tokens.mean": Column("mean tokens", decimals=0),
        **{f"tokens.p{share}": Column(f"P{share} tokens", decimals=0) for share in (10, 50, 90)},
        "at_most.16": Column("time with at most 16 tokens", "%", 1),
    }
    rows = []
    for arm in arms:
        for rate in arm.rates():
            place = "" if len(arm.rates()) == 1 else f", {rate:g}/s"
            for group in arm.runs(rate)[0][OCCUPANCY]:
                cells = []
                for name, column in figures.items():
                    factor = 100.0 if column.unit == "%" else 1.0
                    cells.append(_figure([factor * x for x in arm.values(rate, f"{OCCUPANCY}.{group}.{name}")]))
                rows.append(Row(f"{_name(config, arm)}, {group} machines{place}", tuple(cells)))
    return FigureTable("Tokens of iterations over time", "machines", tuple(figures.values()), tuple(rows))


def _scaled(arm: ArmRuns, rate_per_s: float | None, name: str) -> list[float]:
    """A figure of each seed's run at this rate, in its label's unit."""
    return [value * label_of(name).scale for value in arm.values(rate_per_s, name)]


def _speed(name: str, num_requests: int, took_s: float) -> FigureTable:
    columns = (Column("requests", decimals=0), Column("simulated", "requests/s", 0))
    row = Row(name, (Figure(num_requests, rounds=1), Figure(num_requests / took_s, rounds=1)))
    return FigureTable(SPEED, "experiment", columns, (row,))

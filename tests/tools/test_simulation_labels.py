"""The words and units of simulated figures, and the tables that READMEs show."""

from pathlib import Path
from typing import Any

import pytest

from tools.figures.figure import Figure
from tools.simulation.experiment import read_experiment
from tools.simulation.figure_tables import HELD, SPEED, tables_of
from tools.simulation.figures import label_of, labels_of, scaled_figure
from tools.simulation.machines import ROOT

EXPERIMENTS = sorted((ROOT / "config" / "simulations").glob("*.toml"))


def run(rate: float | None, per_token_s: float) -> dict[str, Any]:
    return {"rate_per_s": rate, "latency": {"per_token_s": {"mean": per_token_s, "p95": 2 * per_token_s}}}


def case(arm: str, variant: str = "", x: float | None = None, **held: float | None) -> dict[str, Any]:
    return {"variant": variant, "arm": arm, "x": x, "runs": [run(2.0, 0.25)], "held": held}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("latency.ttft_s.p99", "P99 prefill latency, s"),
        ("latency.tpot_s.mean", "Mean decode latency, ms"),
        ("classes.-1.latency.ttft_s.mean", "Mean prefill latency, high priority, s"),
        ("fragmentation.mean", "Mean fragmented memory, %"),
        ("rate_per_s", "Requests/s"),
        ("swap.bytes", "swap.bytes"),
    ],
)
def test_figures_have_words_and_units(name: str, text: str) -> None:
    """A figure without a label is shown as its path."""
    assert label_of(name).with_unit == text


def test_an_experiment_may_have_words_of_its_own() -> None:
    """An experiment's labels change the text, and not the unit."""
    assert label_of("latency.ttft_s.p99", {"latency.ttft_s.p99": "Slowest prefill"}).with_unit == "Slowest prefill, s"
    assert labels_of([{"name": "a", "label": "Arm A"}, {"name": "b"}]) == {"": "", "a": "Arm A", "b": "b"}


def test_figures_are_scaled_to_their_unit() -> None:
    """A decode latency is shown in milliseconds; a missing figure stays missing."""
    assert scaled_figure({"latency": {"tpot_s": {"mean": 0.05}}}, "latency.tpot_s.mean") == 50.0
    assert scaled_figure({}, "latency.tpot_s.mean") is None


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_shipped_experiments_are_plotted_in_words(file: Path) -> None:
    """Every figure has words, and every arm a label that is no configuration name."""
    plan = read_experiment(file, {}).plan
    for name in (*plan.figures, *([plan.plot_by] if plan.plot_by else [])):
        assert label_of(name, plan.labels).text != name
    for arm in plan.arms:
        assert arm["label"] != arm["name"]


def test_a_search_is_shown_as_the_rates_that_were_held() -> None:
    """An arm that holds the highest rate of the grid has a lower bound, and one that holds none has an upper bound."""
    search = {"low": 1.0, "high": 8.0, "step": 1.04, "goals": [{"metric": "per_token_s.mean", "limit": 0.3}]}
    config = {"search": search, "arms": [{"name": "a", "label": "Arm A"}, {"name": "b"}, {"name": "c"}]}
    cases = [case("a", goal=5.0), case("b", goal=7.9), case("c", goal=None)]
    [table] = tables_of({"name": "n", "config": config, "cases": cases}, 10, 1.0)
    assert table.title == HELD
    assert table.columns[0].name == "Mean latency per token at most 0.3 s"
    cells = [row.cells[0] for row in table.rows]
    assert [row.name for row in table.rows] == ["Arm A", "b", "c"]
    assert cells == [
        Figure(5.0, rounds=1),
        Figure(7.9, rounds=1, is_lower_bound=True),
        Figure(1.0, rounds=1, is_upper_bound=True),
    ]


def test_a_search_for_service_levels_is_shown() -> None:
    """The goal ``slo`` has a column of its own, and the figure counts the seeds at the edge."""
    search = {"low": 2.0, "high": 8.0, "step_per_s": 2.0, "edge_seeds": [2, 3], "goals": [{"metric": "slo"}]}
    cases = [case("a", goal=6.0), case("b", goal=8.0)]
    config = {"search": search, "arms": [{"name": "a"}, {"name": "b"}]}
    [table] = tables_of({"name": "n", "config": config, "cases": cases}, 10, 1.0)
    assert [column.name for column in table.columns] == ["All limits of the service levels hold"]
    assert [row.cells[0] for row in table.rows] == [Figure(6.0, rounds=3), Figure(8.0, rounds=3, is_lower_bound=True)]


def test_variants_with_x_are_columns() -> None:
    """A row for each arm and a table for each figure; a missing point is an empty cell."""
    config = {"title": "input : output", "variants": [{"name": "one", "x": 1}, {"name": "two", "x": 2}]}
    cases = [case("a", "one", 1), case("a", "two", 2), case("b", "two", 2)]
    config["arms"] = [{"name": "a"}, {"name": "b"}]
    mean, _ = tables_of({"name": "n", "config": config, "cases": cases}, 10, 1.0)
    assert mean.title == "Mean latency per token, s, by input : output"
    assert [column.name for column in mean.columns] == ["1", "2"]
    assert [[cell and cell.median for cell in row.cells] for row in mean.rows] == [[0.25, 0.25], [None, 0.25]]


def test_chosen_figures_are_columns_and_speed_is_the_last_resort() -> None:
    """Runs are rows; an experiment that names nothing to show is about the simulator's speed."""
    values = {"name": "n", "config": {"figures": ["latency.per_token_s.mean"]}, "cases": [case("")]}
    [table] = tables_of(values, 10, 1.0)
    assert [(row.name, row.cells[0] and row.cells[0].median) for row in table.rows] == [("", 0.25)]
    [speed] = tables_of(values | {"config": {}}, 1000, 4.0)
    assert speed.title == SPEED
    assert [cell and cell.median for cell in speed.rows[0].cells] == [1000.0, 250.0]

"""Tables over several seeds: what a figure's median is if a seed has no such figure, and which rates seeds hold."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.sim.experiments import EXPERIMENT, write
from tools.figures.figure import Figure
from tools.simulation import __main__ as program
from tools.simulation.arms import medians_over_seeds
from tools.simulation.figure_tables import HELD, tables_of
from tools.simulation.plots import write_plots
from tools.simulation.report import show

LATENCIES = ("ttft_s", "tpot_s", "tbt_s", "e2e_s", "per_token_s")


def run(rate: float | None, value: float = 1.0, **figures: Any) -> dict[str, Any]:
    summary = dict.fromkeys(("mean", "max", "p50", "p90", "p95", "p99"), value)
    return {
        "rate_per_s": rate,
        "requests": {"arrived": 5, "completed": 5},
        "latency": dict.fromkeys(LATENCIES, summary),
        **figures,
    }


def case(seed: int, *runs: dict[str, Any], **held: float | None) -> dict[str, Any]:
    return {"variant": "", "arm": "", "x": None, "seed": seed, "runs": list(runs), "held": held}


@pytest.mark.parametrize("gaps", [({"mean": 3.0}, None, {"mean": 5.0}), (None, {"mean": 3.0}, {"mean": 5.0})])
def test_a_seed_without_a_figure_leaves_it_to_the_others(
    gaps: tuple[Any, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If no request of a seed migrated, tables and plots show the median of the other seeds."""
    cases = [case(seed, run(2.0, migration={"gap_s": gap})) for seed, gap in enumerate(gaps)]
    values = {"name": "n", "config": {"figures": ["migration.gap_s.mean"]}, "cases": cases}
    assert medians_over_seeds(cases)[0]["runs"][0]["migration"] == {"gap_s": {"mean": 4.0}}
    show(values, Console(width=100))
    assert "4" in capsys.readouterr().out.splitlines()[-2].split()
    assert write_plots(values, tmp_path)


def test_results_are_written_before_they_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the runs gave is on the disk even if showing it fails."""

    def fail(*_: object) -> None:
        raise RuntimeError("no table")

    monkeypatch.setattr(program, "show", fail)
    text = EXPERIMENT[: EXPERIMENT.index("[search]")].replace("cv = 2.0", "cv = 2.0\nrate_per_s = 0.3")
    with pytest.raises(RuntimeError, match="no table"):
        program.main([str(write(tmp_path, text)), "--out", str(tmp_path), "--set", "num_requests=3"])
    assert (tmp_path / "metrics.json").is_file()


@pytest.mark.parametrize(
    ("rates", "figure", "shown"),
    [
        ([6.0, None, 2.0], Figure(2.0, rounds=3), "2 (100% of the best)"),
        ([None, None, 8.0], Figure(1.0, rounds=3, is_upper_bound=True), "under 1"),
        ([None, 8.0], Figure(1.0, rounds=2, is_upper_bound=True), "under 1"),
        ([6.0, 3.0, 2.0], Figure(3.0, 2.0, 6.0, rounds=3), "3 (100% of the best)"),
        ([6.0, 3.0], Figure(4.5, 3.0, 6.0, rounds=2), "4.5 (100% of the best)"),
    ],
)
def test_a_seed_that_holds_no_rate_counts_as_the_lowest(
    rates: list[float | None], figure: Figure, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rate that seeds hold is a median over all of them, in the table as in the figure file."""
    config = {"search": {"low": 1.0, "high": 8.0, "goals": [{"metric": "ttft_s.p99", "limit": 0.3}]}}
    cases = [case(seed, run(1.0), goal=rate) for seed, rate in enumerate(rates)]
    values = {"name": "n", "config": config, "cases": cases}
    [table] = tables_of(values, 10, 1.0)
    assert (table.title, table.rows[0].cells) == (HELD, (figure,))
    show(values, Console(width=100))
    out = " ".join(capsys.readouterr().out.split())
    assert f"requests/s, medians of {len(rates)} seeds" in out
    assert shown in out


def test_a_rate_that_few_seeds_ran_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds search on their own, so the table orders all their rates, and tells how many seeds ran at each."""
    cases = [case(1, run(2.0), run(6.27)), case(2, run(1.0), run(2.0)), case(3, run(2.0))]
    show({"name": "n", "config": {"figures": ["latency.ttft_s.p50"]}, "cases": cases}, Console(width=100))
    out = capsys.readouterr().out
    assert "Figures, medians of 3 seeds" in out
    assert out.count("1 of 3 seeds") == 2
    assert out.count("2 of 3 seeds") == out.count("3 of 3 seeds") == 0
    assert out.index("at 1/s") < out.index("at 2/s") < out.index("at 6.27/s")


def test_machines_with_a_cost_show_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of runs has the cost and the power of the machines if the experiment knows them."""
    machines = {"cost": 12.5, "mean_watts": 4321.0}
    known, unknown = run(1.0, instances=machines), run(2.0, instances=dict.fromkeys(machines))
    show({"name": "n", "config": {}, "cases": [case(1, known, unknown)]}, Console(width=100))
    out = capsys.readouterr().out
    assert out.count("12.5 cost") == out.count(" cost ") == 1
    assert out.count("4.32 kW on average") == out.count("kW") == 1

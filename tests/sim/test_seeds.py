"""Tables over several seeds: what a figure's median is if a seed has no such figure, and which rates seeds hold."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.sim.experiments import EXPERIMENT, write
from tools.simulation import __main__ as program
from tools.simulation.arms import medians_over_seeds
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

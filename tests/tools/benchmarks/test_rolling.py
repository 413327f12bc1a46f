"""tools/bench rolling: every process of a server is restarted under streams."""

from pathlib import Path

import pytest

from tests.tools.benchmarks.run_bench import run_bench
from tools.benchmarks.rolling.rolling import Phase, table_of
from tools.figures.files import read_figures


@pytest.mark.model
def test_all_processes_are_restarted_without_a_failed_request(tmp_path: Path) -> None:
    """Workers, coordinator and gateways restart; every phase has answers, and none has a failure or another token."""
    file = tmp_path / "figures.json"
    options = ("--engine", "fake", "--streams", "8", "--tokens", "32", "--seconds", "2", "--json", str(file))
    done = run_bench("rolling", *options)
    assert done.returncode == 0, done.stderr
    phases = read_figures(file).details["phases"]
    assert [phase["name"] for phase in phases] == [
        "all workers",
        "survivors alone",
        "each worker restarts",
        "the coordinator restarts",
        "each gateway restarts",
    ]
    for phase in phases:
        assert (phase["num_failed"], phase["num_different"]) == (0, 0)
        assert phase["num_answers"] > 0
    assert all(phase["loading_s"] > 0.0 for phase in phases[2:])


def test_one_gateway_cannot_be_restarted_unnoticed() -> None:
    """It is refused before anything starts."""
    done = run_bench("rolling", "--gateways", "1")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "must be at least 2" in done.stderr


def test_restarts_are_compared_with_the_survivors() -> None:
    """The P99 of each phase is divided by that of the survivors with all streams."""
    phases = [
        Phase("survivors alone", 1.0, 0.0, 3, 0, 0, (0.01, 0.01), 0.01),
        Phase("each worker restarts", 1.0, 0.0, 3, 1, 2, (0.02, 0.02), 0.02),
    ]
    table = table_of(phases)
    ratios = [row.cells[5] for row in table.rows]
    assert [figure.median for figure in ratios if figure is not None] == [1.0, 2.0]

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


def test_restarts_are_compared_with_the_survivors_and_with_all_workers() -> None:
    """The P99 of each phase is divided by those of the same round's survivors with all streams, without and with
    loading, and of its undisturbed workers; medians over the rounds are shown.
    """
    phases = []
    for number, (survivors_s, restart_s) in enumerate([(0.01, 0.02), (0.1, 0.1), (0.02, 0.06)]):
        gaps, all_gaps = (restart_s, restart_s), (restart_s, restart_s, 4 * restart_s)
        phases += [
            Phase("all workers", number, 1.0, 0.0, 3, 0, 0, (0.04,), (0.04,)),
            Phase("survivors alone", number, 1.0, 0.0, 3, 0, 0, (survivors_s,), (survivors_s, 1.0)),
            Phase("each worker restarts", number, 1.0, 0.0, 3, 1, 2, gaps, all_gaps),
        ]
    rows = {row.name: row.cells for row in table_of(phases).rows}
    survivors, restarts = rows["survivors alone"], rows["each worker restarts"]
    assert [None if cell is None else cell.median for cell in (survivors[5], restarts[5])] == [1.0, 2.0]
    assert restarts[6] is not None
    assert restarts[6].median == pytest.approx(0.06 / 0.04)
    assert restarts[7] is not None
    assert restarts[7].median == pytest.approx(2.0 * (1 + 3 * 0.98))

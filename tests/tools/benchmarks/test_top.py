"""tools/bench top: a console watches a real coordinator with simulated workers."""

from pathlib import Path

from tests.tools.benchmarks.run_bench import run_bench
from tools.figures.files import read_figures


def test_the_live_view_is_measured(tmp_path: Path) -> None:
    """All workers are seen, and each round has the times of its redraws."""
    file = tmp_path / "figures.json"
    done = run_bench("top", "--workers", "4", "--rounds", "2", "--seconds", "0.3", "--json", str(file))
    assert done.returncode == 0, done.stderr
    (point,) = read_figures(file).details["points"]
    assert point["num_workers"] == 4
    assert len(point["redraw_s"]) == 2
    assert 0.0 < min(point["redraw_s"]) <= max(point["slowest_s"])

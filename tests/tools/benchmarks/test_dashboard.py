"""tools/bench dashboard: pages watch a real gateway with simulated workers."""

from pathlib import Path

import pytest

from tests.tools.benchmarks.run_bench import run_bench
from tools.figures.files import read_figures


@pytest.mark.model
def test_open_pages_are_measured(tmp_path: Path, default_model_path: Path) -> None:
    """Each number of pages has what they cost in each round, and the pages got snapshots."""
    file = tmp_path / "figures.json"
    options = ("--workers", "2", "--per-worker", "2", "--pages", "1,3", "--rounds", "2", "--seconds", "3")
    done = run_bench("dashboard", *options, "--model", str(default_model_path), "--json", str(file))
    assert done.returncode == 0, done.stderr
    points = read_figures(file).details["points"]
    assert [point["num_pages"] for point in points] == [1, 3]
    for point in points:
        assert len(point["cpu"]) == len(point["idle_cpu"]) == 2
        assert max(point["bytes_per_page_s"]) > 500

"""tools/bench power-budget: budgets at a console of real processes, beside a fake driver."""

from pathlib import Path

import pytest

from tests.tools.benchmarks.run_bench import run_bench
from tools.benchmarks.power.budget import TITLE
from tools.figures.files import read_figures

pytestmark = [pytest.mark.e2e, pytest.mark.model]


def test_budgets_are_measured(tmp_path: Path, default_model_path: Path) -> None:
    """Each change of the budget reaches the driver before a console reads it back, and is read back in time."""
    file = tmp_path / "figures.json"
    done = run_bench("power-budget", "--model", str(default_model_path), "--rounds", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = read_figures(file).table(TITLE).rows
    assert len(rows) == 3
    for row in rows:
        in_driver, read_back, _ = (cell.median for cell in row.cells if cell is not None)
        assert 0.0 < in_driver < read_back < 5.0

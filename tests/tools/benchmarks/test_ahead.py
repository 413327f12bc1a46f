"""tools/bench ahead: a server that plans one iteration ahead and one that does not, in turns."""

from pathlib import Path

import pytest

from tests.tools.benchmarks.run_bench import run_bench
from tools.benchmarks.serving import ahead
from tools.benchmarks.serving.ahead import Measured
from tools.figures.files import read_figures


def test_the_first_server_is_compared_with_the_second() -> None:
    """Rates and waits are medians over rounds, and latencies percentiles over all requests."""
    one = Measured([10.0, 30.0, 20.0], [0.001, 0.001, 0.002], [0.1, 0.3, 0.2], [0.01])
    two = Measured([10.0, 10.0, 10.0], [0.002, 0.004, 0.004], [0.1, 0.1, 0.1], [0.02])
    rows = {
        row.name: [cell.median for cell in row.cells if cell] for row in ahead.table_of({"a": one, "b": two}, 3).rows
    }
    assert rows["output tokens/s"] == [20.0, 10.0, 2.0]
    assert rows["wait between iterations, ms"] == [1.0, 4.0, 0.5]
    assert rows["TTFT P50, ms"] == pytest.approx([200.0, 100.0, 2.0])
    assert rows["TPOT P50, ms"] == pytest.approx([10.0, 20.0, 0.5])


@pytest.mark.e2e
@pytest.mark.model
def test_real_servers_are_measured(tmp_path: Path, default_model_path: Path) -> None:
    """With the fake engine both servers are measured, and every quantity has a ratio."""
    figures = tmp_path / "figures.json"
    options = ("--model", str(default_model_path), "--engine", "fake", "--dtype", "auto", "--rounds", "1")
    load = ("--requests", "12", "--concurrency", "4", "--prompt-tokens", "16", "--output-tokens", "8")
    done = run_bench("ahead", *options, *load, "--json", str(figures))
    assert done.returncode == 0, done.stderr
    (table,) = read_figures(figures).tables
    assert all(None not in row.cells for row in table.rows)

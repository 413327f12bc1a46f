"""tools/bench transport: every way is measured in each round, and a report shows the ratios."""

from pathlib import Path

import pytest

from tools.benchmarks.__main__ import main
from tools.benchmarks.cluster.transport import Row, ratio
from tools.figures.figure import Figure
from tools.figures.files import read_figures


def test_a_ratio_compares_rates() -> None:
    """Twice the rate is twice as fast."""
    rows = [Row("a", Figure(4.0), Figure(1.0)), Row("b", Figure(2.0), Figure(0.5))]
    assert ratio(rows, "a", "b") == 2.0


@pytest.mark.e2e
@pytest.mark.parametrize("options", [[], ["--scattered"]])
def test_every_way_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    """Each way copies between real processes, and the report and the file name every way."""
    file = tmp_path / "figures.json"
    assert main(["transport", "--mib", "2", "--rounds", "1", "--json", str(file), *options]) == 0
    figures = read_figures(file)
    rates, compared = figures.tables
    ways = ["memcpy", "shared memory", "TCP", "TCP, crc32", "Unix socket"]
    ways += ["bare pyzmq TCP", "bare pyzmq TCP, copied into the pool", "gloo"]
    assert [row.name for row in rates.rows] == ways
    assert all(figure is not None and figure.median > 0 for row in rates.rows for figure in row.cells)
    assert len(compared.rows) == 6
    assert ("--scattered" in figures.command) == bool(options)
    out = capsys.readouterr().out
    assert "shared memory / memcpy: " in out
    assert "TCP / bare pyzmq TCP: " in out

"""tools/bench keys: messages and KV with and without keys, in the same rounds."""

from pathlib import Path

import pytest

from tools.benchmarks.__main__ import main
from tools.benchmarks.cluster.keys import Rate, table_of
from tools.figures.figure import Figure
from tools.figures.files import read_figures


def test_a_ratio_is_one_of_the_same_round() -> None:
    """A machine that slows down between rounds changes the rates, and not the ratios."""
    without = [Rate(4.0, 9.0), Rate(2.0, 9.0), Rate(1.0, 9.0)]
    with_keys = [Rate(2.0, 3.0), Rate(1.0, 3.0), Rate(0.5, 3.0)]
    (row,) = table_of({"KV": {"without": without, "with": with_keys}}).rows
    assert row.cells[2] == Figure(0.5, 0.5, 0.5, 3)
    assert row.cells[3] == Figure(3.0 / 9.0, 3.0 / 9.0, 3.0 / 9.0, 3)


@pytest.mark.e2e
def test_all_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real processes exchange messages and KV, plain and encrypted, and the file names the command."""
    file = tmp_path / "figures.json"
    assert main(["keys", "--mib", "2", "--rounds", "1", "--seconds", "0.05", "--json", str(file)]) == 0
    (table,) = read_figures(file).tables
    assert [row.name for row in table.rows] == ["placements/s", "tokens/s", "KV GB/s"]
    assert all(figure is not None and figure.median > 0 for row in table.rows for figure in row.cells)
    assert "goal for placements and tokens: 0.9x" in capsys.readouterr().out

"""tools/bench transport: every way is measured in each round, and a report tells the ratios."""

import json
from pathlib import Path

import pytest

from tools.benchmarks.__main__ import main
from tools.benchmarks.transport import Row, ratio


def test_a_ratio_is_of_rates() -> None:
    """Twice the rate is twice as fast."""
    rows = [Row("a", 4e9, 1.0), Row("b", 2e9, 0.5)]
    assert ratio(rows, "a", "b") == 2.0


@pytest.mark.e2e
@pytest.mark.parametrize("options", [[], ["--scattered"]])
def test_every_way_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    """Each way copies between real processes, and the report and the file name them all."""
    file = tmp_path / "figures.json"
    assert main(["transport", "--mib", "2", "--rounds", "1", "--json", str(file), *options]) == 0
    figures = json.loads(file.read_text(encoding="utf-8"))
    ways = ["memcpy", "shared memory", "TCP", "TCP, crc32", "Unix socket"]
    ways += ["bare pyzmq TCP", "bare pyzmq TCP, put into place", "gloo"]
    assert [row["name"] for row in figures["rows"]] == ways
    assert all(row["bytes_per_s"] > 0 for row in figures["rows"])
    assert figures["workload"]["scattered"] == bool(options)
    out = capsys.readouterr().out
    assert "shared memory / memcpy: " in out
    assert "TCP / bare pyzmq TCP: " in out

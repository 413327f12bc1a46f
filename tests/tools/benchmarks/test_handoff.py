"""tools/bench handoff: the second token's delay, from the times of tokens and with real workers."""

import argparse
import tempfile
from pathlib import Path

import pytest

from tests.tools.benchmarks.run_bench import run_bench
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.migration import handoff
from tools.benchmarks.migration.handoff import Split
from tools.figures.files import read_figures

QUICK = ("--engine", "fake", "--lengths", "48,200", "--rounds", "1")


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    handoff.add_arguments(parser)
    return parser.parse_args(arguments)


def test_a_delay_is_counted_in_steps_of_the_unsplit_request() -> None:
    """The second token is late by what its gap has beyond the unsplit request's gap in the same round."""
    splits = [
        Split(64, way, 1.0, gap_s, step_s, True)
        for way, step_s, gaps_s in (("unsplit", 0.02, (0.02, 0.03)), ("chunked", 0.05, (0.04, 0.03)))
        for gap_s in gaps_s
    ]
    assert handoff.delays(splits, 64, "chunked") == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize(("option", "value"), [("--rounds", "0"), ("--lengths", "64,64")])
def test_senseless_options_are_refused(option: str, value: str) -> None:
    """The error names the option."""
    with pytest.raises(BenchError, match=option):
        handoff.run(parsed(option, value))


@pytest.mark.e2e
def test_two_workers_share_a_request(tmp_path: Path) -> None:
    """Requests change hands with their KV in all ways, and give the unsplit request's tokens."""
    figures = tmp_path / "figures.json"
    with tempfile.TemporaryDirectory(prefix="as-") as folder:  # pytest's own have too long a path for sockets
        done = run_bench("handoff", *QUICK, "--json", str(figures), folder=folder)
        assert done.returncode == 0, done.stderr
        assert list(Path(folder).iterdir()) == []
    written = read_figures(figures)
    assert [len(table.rows) for table in written.tables] == [2]
    assert {row["way"]: row["has_kv"] for row in written.details["splits"]} == {
        "unsplit": False,
        "layer-wise": True,
        "chunked": True,
        "serialized": True,
    }

"""tools/bench checkpoints: pauses and throughput from the times of tokens, and real workers that are killed."""

import argparse
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from tests.tools.benchmarks.run_bench import run_bench
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.migration import checkpoints
from tools.benchmarks.migration.checkpoints import Death, Decoding
from tools.benchmarks.migration.pair import Stream
from tools.benchmarks.migration.set_up import require_tokens
from tools.figures.files import read_figures

QUICK = (
    *("--engine", "fake", "--lengths", "48,200", "--rounds", "1", "--before", "6", "--every", "16"),
    *("--streams", "2", "--stream-tokens", "40", "--measured", "40"),
)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    checkpoints.add_arguments(parser)
    return parser.parse_args(arguments)


def test_throughput_counts_a_window() -> None:
    """Throughput counts all streams' tokens after the window's beginning, up to its end."""
    streams = [Stream("a", [], [1.0, 2.0, 3.0, 4.0]), Stream("b", [], [2.5, 3.5])]
    assert checkpoints.tokens_per_s(streams, 2.0, 4.0) == pytest.approx(2.0)


def test_a_death_that_changes_tokens_fails() -> None:
    """The error names the way; tokens beyond the undisturbed ones are not compared."""

    def killed(way: str, *token_ids: int) -> tuple[str, list[int]]:
        killed = checkpoints._Killed(Death(64, way, 2.0, 0.1, True), [*token_ids])
        return killed.name, killed.token_ids

    require_tokens([1, 2], [killed("with", 1, 2, 3), killed("without", 1, 2)])
    with pytest.raises(BenchError, match="with checkpoints: a request of 64 tokens got other tokens"):
        require_tokens([1, 2], [killed("without", 1, 2), killed("with", 1, 3)])


def test_tables_hold_medians_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    """One bad round moves no median; the table counts how often requests continued from KV."""
    deaths = [
        Death(1024, way, 2.25, pause_s, way == "with" and pause_s < 1.0)
        for way, pauses_s in (("without", (0.8, 0.6, 9.0)), ("with", (0.1, 0.2, 3.0)))
        for pause_s in pauses_s
    ]
    decodings = [
        Decoding(way, side, 90.0 if way == "with" else 100.0, 0.004 if way == "with" else 0.002, 3 * 2**20)
        for way in checkpoints.WAYS
        for side in ("source", "store")
    ]
    checkpoints.show(deaths, decodings, Console(width=200))
    lines = capsys.readouterr().out.splitlines()
    [row] = [line for line in lines if "1,024" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["1,024", "800", "200", "4.0", "2/3", "2.25"]
    [row] = [line for line in lines if "source" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["source", "100.0", "90.0", "0.900", "2.00", "4.00", "2.000"]
    assert "3.0 MiB" in lines[-1]


@pytest.mark.parametrize(
    ("option", "value"),
    [("--rounds", "0"), ("--every", "0"), ("--before", "1"), ("--measured", "5000"), ("--lengths", "9,9")],
)
def test_numbers_out_of_range_are_one_line(option: str, value: str) -> None:
    """The error names the option, before any process is started."""
    with pytest.raises(BenchError, match=option):
        checkpoints.run(parsed(option, value))


@pytest.mark.e2e
def test_real_workers_are_killed(tmp_path: Path) -> None:
    """Requests continue from checkpoints in one way and without them in the other, and no file is left behind."""
    figures = tmp_path / "figures.json"
    with tempfile.TemporaryDirectory(prefix="as-") as folder:  # pytest's own have too long a path for sockets
        done = run_bench("checkpoints", *QUICK, "--json", str(figures), folder=folder)
        assert done.returncode == 0, done.stderr
        assert list(Path(folder).iterdir()) == []
    written = read_figures(figures)
    assert [len(table.rows) for table in written.tables] == [2, 2]
    told = written.details
    assert [(row["context_tokens"], row["way"]) for row in told["deaths"]] == [
        (length, way) for length in (48, 200) for way in ("with", "without")
    ]
    for row in told["deaths"]:
        assert row["has_adopted"] == (row["way"] == "with")
        assert row["pause_s"] > 0.0
        assert row["detection_s"] > 0.0
    assert [(row["way"], row["side"]) for row in told["decodings"]] == [
        (way, side) for way in ("with", "without") for side in ("source", "store")
    ]
    copied = {(row["way"], row["side"]): row["checkpointed_bytes"] for row in told["decodings"]}
    assert copied["with", "source"] > 0
    assert copied["without", "source"] == 0

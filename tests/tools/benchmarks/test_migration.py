"""tools/bench migration: downtime and slowdown from the times of tokens, and real workers that move requests."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from actorserve.core.messages import (
    Attained,
    CopyDone,
    HandOver,
    KVTicket,
    Message,
    Offer,
    Peer,
    RequestSpec,
    SamplingParams,
    Stage,
    Start,
    StepDone,
    Transfer,
    TransferId,
    TransferKind,
)
from actorserve.wire.journal import Entry
from tests.tools.benchmarks.run_bench import DEADLINE_S, ROOT, run_bench
from tools.benchmarks.__main__ import EXIT_INTERRUPTED
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.migration import migration
from tools.benchmarks.migration.move_times import (
    PARTS,
    Move,
    gaps_of,
    goals_of,
    num_stages,
    parts_of,
    slowdown_of,
    summary_of,
    tokens_by,
    usual_gap_s,
)
from tools.benchmarks.migration.pair import Stream
from tools.benchmarks.migration.set_up import require_tokens
from tools.figures.files import read_figures

SOURCE, GATEWAY = Peer("worker-0", 1), Peer("gateway-0", 1)
MOVED = Transfer(SOURCE, TransferId(TransferKind.MIGRATION, 7))
SPEC = RequestSpec("r", (1, 2), SamplingParams(seed=0, max_tokens=9))
MOVE = Move(256, "live", 0.01, 0.018, 0.02, 0.05, True, 2, 4096, {"source": 1.01, "destination": 0.99}, {})
QUICK = (
    *("--engine", "fake", "--lengths", "48,200", "--rounds", "1", "--before", "6"),
    *("--neighbours", "2", "--neighbour-tokens", "40"),
)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    migration.add_arguments(parser)
    return parser.parse_args(arguments)


def test_a_step_is_the_usual_time_between_tokens_of_a_window() -> None:
    """The median ignores tokens before all requests decoded, one odd step, and tokens after the order."""
    times_s = [0.0, 5.0, 5.1, 5.2, 5.9, 6.0, 9.0]
    assert usual_gap_s(times_s, 5.0, 6.0) == pytest.approx(0.1)
    with pytest.raises(BenchError, match="too few"):
        usual_gap_s(times_s, 5.9, 6.0)


def test_downtime_lies_across_the_hand_over() -> None:
    """A longer gap during the copy is a figure of its own; gaps before the order or after the downtime do not count."""
    times_s = [0.0, 4.0, 5.0, 6.5, 7.0, 9.0, 19.0]
    assert gaps_of(times_s, ordered_s=5.5, handed_over_s=8.0) == (2.0, 2.0)
    assert gaps_of(times_s, ordered_s=4.5, handed_over_s=6.6) == (0.5, 1.5)
    assert gaps_of(times_s, ordered_s=7.5, handed_over_s=8.0) == (2.0, 2.0)
    with pytest.raises(BenchError, match="no token came"):
        gaps_of(times_s, ordered_s=5.5, handed_over_s=20.0)


def test_a_window_holds_parts_of_steps() -> None:
    """Tokens at a steady pace give the same count for windows of one length, wherever these begin."""
    times_s = [float(number) for number in range(10)]
    assert [tokens_by(times_s, at_s) for at_s in (-1.0, 0.5, 3.0, 3.25)] == [0.0, 0.5, 3.0, 3.25]
    assert tokens_by(times_s, 6.7) - tokens_by(times_s, 4.1) == pytest.approx(2.6)


def test_neighbours_are_compared_with_themselves_before() -> None:
    """Twice the time per token during the window is a slowdown of two, over all streams together."""
    halved = [0.0, 1.0, 2.0, 4.0, 6.0, 8.0]
    steady = [float(number) for number in range(9)]
    assert slowdown_of([halved], 0.0, 2.0, 6.0) == pytest.approx(2.0)
    assert slowdown_of([halved, steady], 0.0, 2.0, 6.0) == pytest.approx(2.0 / 1.5)
    assert slowdown_of([], 0.0, 2.0, 6.0) is None
    with pytest.raises(BenchError, match="all that time"):
        slowdown_of([halved], 0.0, 2.0, 9.0)


def test_parts_of_a_downtime_add_up() -> None:
    """The last stage, its copy, the gateway and the destination have a part each; other migrations are ignored."""

    def entry(now: float, message: Message, sender: Peer | None = SOURCE) -> Entry:
        return Entry(now, sender, message)

    ticket = KVTicket(MOVED.id, 0, False, (1,), "")
    other = replace(ticket, transfer=TransferId(TransferKind.MIGRATION, 8))
    offer = Offer(1, GATEWAY, SPEC, 1, ticket, is_last=False)
    destination = [
        entry(1.0, offer),
        entry(1.1, replace(offer, ticket=other)),
        entry(1.2, CopyDone(1, 0.1), None),
        entry(2.5, Stage((3,), 2, ticket, is_last=True)),
        entry(2.75, CopyDone(2, 0.1), None),
        entry(3.5, Start(2, SPEC, transfer=MOVED), GATEWAY),
        entry(4.0, StepDone(1, 0.75, ("other",), (0,), (1,)), None),
        entry(5.0, StepDone(2, 0.75, ("other", "r"), (1, 1), (1, 1)), None),
    ]
    gateway = [entry(3.0, HandOver("r", 1, Peer("worker-1", 1), MOVED.id, 1, Attained()))]
    parts = parts_of(gateway, destination, MOVED, "r", last_token_s=2.0, first_token_s=5.25)
    assert list(parts.values()) == [0.5, 0.25, 0.25, 0.5, 0.75, 0.75, 0.25]
    assert list(parts) == list(PARTS)
    assert num_stages(destination, MOVED) == 2
    with pytest.raises(BenchError, match="journals do not show"):
        parts_of([], destination, MOVED, "r", 2.0, 5.25)


def test_goals_are_of_live_migration() -> None:
    """The worst length, the longest over the shortest, and each side's neighbours; other ways have no goals."""
    long = replace(MOVE, context_tokens=8192, downtime_s=0.03)
    figures = [summary_of([MOVE]), summary_of([long]), summary_of([replace(long, way="blocking", downtime_s=1.0)])]
    goals = goals_of(figures)
    assert [goal.value for goal in goals] == pytest.approx([3.0, 3.0 / 1.8, 1.01, 0.99])
    assert [goal.is_met for goal in goals] == [False, False, True, True]
    assert goals_of(figures[2:]) == []


def test_rounds_are_summed_up_as_medians() -> None:
    """One bad round moves no median, and is the maximum; moves without copied KV are counted."""
    moves = [MOVE, MOVE, replace(MOVE, downtime_s=0.5, has_adopted=False)]
    summary = summary_of(moves)
    assert summary.downtime_steps.median == pytest.approx(1.8)
    assert (summary.downtime_steps.min, summary.downtime_steps.max) == pytest.approx((1.8, 50.0))
    assert (summary.num_moves, summary.num_adopted) == (3, 2)


def test_a_move_that_changes_tokens_fails() -> None:
    """The error names the way; tokens beyond the undisturbed ones are not compared."""

    def measured(way: str, *token_ids: int) -> tuple[str, list[int]]:
        moved = migration._Measured(256, way, Stream("r", [*token_ids]), 0.0, 1.0, 0, True, {})
        return moved.name, moved.subject.token_ids

    require_tokens([1, 2], [measured("live", 1, 2, 3), measured("blocking", 1, 2)])
    with pytest.raises(BenchError, match="recompute: a request of 256 tokens was moved and got other tokens"):
        require_tokens([1, 2], [measured("live", 1, 2, 3), measured("recompute", 1, 4)])
    with pytest.raises(BenchError, match=r"live: .* other tokens"):
        require_tokens([1, 2], [measured("live", 1)])


def test_a_table_holds_every_way_and_length(capsys: pytest.CaptureFixture[str]) -> None:
    """The tables work without neighbours, and without live migration, the only way that has goals."""
    moves = [
        replace(MOVE, way=way, context_tokens=length) for length in (256, 4096) for way in ("blocking", "recompute")
    ]
    alone = [summary_of([replace(move, slowdown={"source": None, "destination": None})]) for move in moves]
    migration.show(alone, Console(width=200))
    shown = capsys.readouterr().out
    assert shown.count("4,096") == 3
    assert "18 (1.8)" in shown
    assert "goal" not in shown


@pytest.mark.parametrize(
    ("option", "value"), [("--ways", "live,live"), ("--ways", "teleport"), ("--lengths", "0"), ("--dtype", "int2")]
)
def test_odd_options_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ways that are named twice or unknown, and prompts without tokens, are refused."""
    with pytest.raises(SystemExit):
        parsed(option, value)
    assert option in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"), [("--rounds", "0"), ("--neighbours", "-1"), ("--before", "1"), ("--lengths", "9,9")]
)
def test_numbers_out_of_range_are_one_line(option: str, value: str) -> None:
    """The error names the option, before any process is started."""
    with pytest.raises(BenchError, match=option):
        migration.run(parsed(option, value))


@pytest.fixture
def private_tmp() -> Iterator[dict[str, str]]:
    """The environment of a process with a folder of its own for temporary files."""
    with tempfile.TemporaryDirectory(prefix="as-") as folder:  # pytest's own have too long a path for sockets
        yield {**os.environ, "TMPDIR": folder}


@pytest.mark.e2e
def test_real_workers_are_measured(tmp_path: Path, private_tmp: dict[str, str]) -> None:
    """Requests move with their KV, all ways give the tokens of a request that stays, and no file is left behind."""
    figures, plot = tmp_path / "figures.json", tmp_path / "downtime.png"
    done = run_bench("migration", *QUICK, "--json", str(figures), "--plot", str(plot), folder=private_tmp["TMPDIR"])
    assert done.returncode == 0, done.stderr
    written = read_figures(figures)
    assert written.command == f"tools/bench migration {' '.join(QUICK)} --plot {plot}"
    assert [len(table.rows) for table in written.tables] == [2, 6]
    told = written.details
    assert [(summary["context_tokens"], summary["way"]) for summary in told["summaries"]] == [
        (length, way) for length in (48, 200) for way in ("live", "blocking", "recompute")
    ]
    for summary in told["summaries"]:
        assert summary["num_adopted"] == (summary["way"] != "recompute")
        assert (summary["copied_bytes"] > 0) == (summary["way"] != "recompute")
        assert bool(summary["parts"]) == (summary["way"] != "recompute")
        assert summary["downtime_steps"]["median"] > 0.0
        assert set(summary["slowdown"]) == {"source", "destination"}
    assert len(told["goals"]) == 4
    assert "downtime in decode steps" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert list(Path(private_tmp["TMPDIR"]).iterdir()) == []


@pytest.mark.e2e
def test_an_interrupted_measurement_leaves_nothing(private_tmp: dict[str, str]) -> None:
    """A Ctrl-C while workers run ends them, and removes all files."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.benchmarks", "migration", *QUICK, "--rounds", "1000"],
        cwd=ROOT,
        env=private_tmp,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        folder, deadline_s = Path(private_tmp["TMPDIR"]), time.monotonic() + DEADLINE_S
        while len(list(folder.rglob("worker-?.sock"))) < 6 and process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == EXIT_INTERRUPTED, said
    assert "interrupted" in said
    assert list(folder.iterdir()) == []
    assert not [file for file in Path("/proc").glob("[0-9]*/cmdline") if str(folder) in _text(file)]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the process has just ended
        return ""

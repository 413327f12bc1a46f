"""The arithmetic of tools/bench start, step, serve --peer and peers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.tools.benchmarks.run_bench import run_bench
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.engine.step import Timers, break_down
from tools.benchmarks.peers import llama_build
from tools.benchmarks.serving import side_by_side
from tools.benchmarks.serving.side_by_side import Served, summarize
from tools.benchmarks.serving.start import summarize as summarize_starts
from tools.benchmarks.serving.statistics import Outcome, make_report
from tools.figures.figure import Figure
from tools.figures.files import read_figures

TINY = {
    "engine": [
        "--only-ours",
        "--dtypes",
        "float32",
        "--prompts",
        "8",
        "--batches",
        "2",
        "--context",
        "8",
        "--rounds",
        "1",
    ],
    "perplexity": ["--only-ours", "--dtypes", "float32", "--tokens", "64", "--window", "32"],
    "step": ["--dtype", "float32", "--batches", "1", "--context", "8", "--prompt", "8", "--rounds", "1"],
    "start": ["--dtype", "float32", "--rounds", "1", "--no-server"],
}


def test_starts_are_compared_with_torch_alone() -> None:
    """The figures are medians, and their ratio to the median of the import."""
    starts = summarize_starts({"import torch": [2.0, 1.0, 9.0], "engine": [3.0, 2.0, 4.0]})
    assert [(start.name, start.seconds.median, start.ratio) for start in starts] == [
        ("import torch", 2.0, 1.0),
        ("engine", 3.0, 1.5),
    ]


def ticking() -> Iterator[float]:
    now_s = 0.0
    while True:
        yield now_s
        now_s += 1.0


def test_the_outermost_of_nested_timers_counts() -> None:
    """The time of a linear layer within the head counts for the head, and only once."""
    clock = ticking()
    timers = Timers(lambda: next(clock))
    linear = timers.wrap("linear", lambda: None)
    head = timers.wrap("head", linear)
    timers.on = True
    head()
    linear()
    assert timers.seconds == {"head": 1.0, "linear": 1.0}


def test_timers_do_not_count_while_off_and_survive_errors() -> None:
    """An error in a timed function leaves the timer usable."""
    clock = ticking()
    timers = Timers(lambda: next(clock))

    def fail() -> None:
        raise ValueError("no")

    failing = timers.wrap("part", fail)
    with pytest.raises(ValueError, match="no"):
        failing()
    assert timers.seconds == {"part": 0.0}
    timers.on = True
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            failing()
    assert timers.seconds == {"part": 2.0}


def test_the_rest_is_the_time_outside_of_parts() -> None:
    """Parts and rest add up to the whole, which is measured without timers."""
    timers = Timers()
    work = timers.wrap("work", lambda: sum(range(20_000)))
    found = break_down("decode 1", work, 3, timers)
    assert set(found.parts_ms) == {"work", "sums, tiles, Python"}
    assert found.parts_ms["work"].median > 0
    assert sum(part.median for part in found.parts_ms.values()) >= found.total_ms.median * 0.999


def outcome(ttft_s: float, tpot_s: float, error: str | None = None) -> Outcome:
    return Outcome(0.0, [ttft_s, ttft_s + tpot_s], ttft_s + tpot_s, 10, 2, error)


def test_a_server_shows_medians_of_its_turns() -> None:
    """Each figure is the median over turns; tokens are counted over all of them."""
    served = summarize("a", [make_report([outcome(ttft_s, 1.0)], 0.0) for ttft_s in (1.0, 3.0, 9.0)])
    assert (served.ttft_s, served.tpot_ms.median) == (Figure(3.0, 1.0, 9.0, 3), 1e3)
    assert served.tokens_per_s.median == 0.5
    assert (served.prompt_tokens, served.output_tokens) == (30, 6)


def test_a_server_with_failed_requests_is_not_compared() -> None:
    """Comparing is an error, because the server had fewer requests than the other servers."""
    with pytest.raises(BenchError, match="a: requests failed"):
        summarize("a", [make_report([outcome(1.0, 1.0, "timeout")], 0.0)])


def test_unequal_work_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """If the servers counted different numbers of tokens, a line below the table says so."""
    ours = Served("actorserve", Figure(30.0), Figure(1.0), Figure(0.1), 100, 64)
    theirs = Served("llama-server Q4_0", Figure(10.0), Figure(1.0), Figure(0.1), 99, 64)
    side_by_side.show([ours, theirs], Console(width=200))
    shown = capsys.readouterr().out
    assert "3.00" in shown
    assert "different numbers" in shown


def test_a_builds_progress_is_parsed() -> None:
    """Ninja's and make's progress lines give a share, and other lines give none."""
    assert llama_build.share_done("[3/12] Building CXX object") == 0.25
    assert llama_build.share_done("[ 40%] Building CXX object") == 0.4
    assert llama_build.share_done("-- Configuring done") is None


def test_the_peers_version_is_pinned() -> None:
    """The constraints file pins llama-cpp-python."""
    assert llama_build.pinned_version()[0].isdecimal()


def test_llama_cpps_amx_kernels_are_built_so_that_they_run() -> None:
    """Where a CPU has AMX, the compiler keeps the stores that the tile configuration consists of."""
    with_amx = llama_build.configure_flags(("avx2", "amx_int8"))
    assert any("CXX_FLAGS" in flag and "-fno-dse" in flag for flag in with_amx)
    assert not any("-fno-dse" in flag for flag in llama_build.configure_flags(("avx2",)))


def test_a_missing_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without build tools the error names them, and leaves no build that looks complete."""
    monkeypatch.setenv("ACTORSERVE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match=r"takes cmake and g\+\+; apt install cmake g\+\+"):
        llama_build.ensure_build(Console())
    assert llama_build.find_build() is None


@pytest.mark.model
@pytest.mark.parametrize("command", TINY)
def test_a_command_measures_the_real_engine(command: str, tmp_path: Path) -> None:
    """At a tiny size, each command ends well, shows a table, and writes its command and figures as JSON."""
    figures = tmp_path / "figures.json"
    arguments = [command, *TINY[command], "--threads", "1", "--json", str(figures)]
    done = run_bench(*arguments)
    assert done.returncode == 0, done.stderr
    assert "┃" in done.stdout
    written = read_figures(figures)
    assert written.command == f"tools/bench {' '.join(arguments[:-2])}"
    assert all(row.cells[0] is not None for table in written.tables for row in table.rows)

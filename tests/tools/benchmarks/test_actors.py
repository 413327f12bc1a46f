"""tools/bench actors: the pairs answer, the figures are medians, and no process or file remains."""

import argparse
from pathlib import Path

import pytest
from rich.console import Console

from tests.tools.benchmarks.run_bench import run_bench
from tools.benchmarks.cluster import actors
from tools.benchmarks.cluster.actors import Contestant, Pair, contestants, ratios, summarize
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.processes import Memory, cpu_s, memory_of
from tools.benchmarks.peers import ray_build
from tools.benchmarks.peers.calls import answer, windows
from tools.benchmarks.peers.our_actors import OurCaller
from tools.benchmarks.peers.ray_actors import descendants
from tools.figures.figure import Figure
from tools.figures.files import read_figures

MEMORY = Memory(2, 2**20, None), Memory(2, 2**21, 2**20)
PAIRS = {
    "ours": Contestant(actors.OURS, "tools.benchmarks.peers.our_actors"),
    "pyzmq": Contestant(actors.PYZMQ, "tools.benchmarks.peers.pyzmq_actors"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_answers_every_call_and_ends(name: str) -> None:
    """Each call has a time, the two processes have memory, and both are gone at the end."""
    with Pair(PAIRS[name]) as pair:
        pair.wait_ready()
        times = pair.one_at_a_time(5)
        assert len(times) == 5
        assert min(times) > 0.0
        assert pair.pipelined(25, 10) > 0.0
        of_two, in_all = pair.memory()
        assert of_two.num_processes == in_all.num_processes == 2
        assert of_two.pss_bytes == pytest.approx(in_all.pss_bytes, rel=0.1)  # read one after the other
        assert of_two.rss_bytes > 2**20
        started = [pair._process.pid, *descendants(pair._process.pid)]
    assert len(started) == 2
    assert memory_of(started).num_processes == 0
    assert not Path(pair._folder.name).exists()


def test_rays_pair_answers_every_call_and_ends() -> None:
    """Two of Ray's actors are measured like ours, with all processes that Ray runs, and all of them end."""
    python = ray_build.find_ray()
    if python is None:
        pytest.skip(f"Ray is not installed: {ray_build.ADVICE}")
    with Pair(Contestant(actors.RAY, "tools.benchmarks.peers.ray_actors", python)) as pair:
        pair.wait_ready()
        assert len(pair.one_at_a_time(3)) == 3
        assert pair.pipelined(10, 5) > 0.0
        of_two, in_all = pair.memory()
        assert of_two.num_processes == 2
        assert in_all.num_processes > 2
        started = descendants(pair._process.pid)
    assert memory_of(started).num_processes == 0
    assert not Path(pair._folder.name).exists()


def test_a_pair_that_cannot_start_says_why() -> None:
    """A missing module is an error with the pair's name."""
    with Pair(Contestant("nobody", "tools.benchmarks.peers.nobody")) as pair, pytest.raises(BenchError, match="nobody"):
        pair.wait_ready()


def test_an_unknown_command_is_an_error(tmp_path: Path) -> None:
    """A caller answers an unknown command with an error."""
    caller = OurCaller(str(tmp_path))
    try:
        assert "error" in answer(caller, {"sing": 3})
    finally:
        caller.close()


def test_ray_that_is_not_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours and pyzmq are measured without it, and a line names the command that installs Ray."""
    monkeypatch.setenv("ACTORSERVE_CACHE", str(tmp_path))
    arguments = argparse.Namespace(without_ray=False)
    assert [contestant.name for contestant in contestants(arguments, Console())] == [actors.OURS, actors.PYZMQ]
    assert ray_build.ADVICE in capsys.readouterr().out


def test_figures_are_medians_and_ratios_say_how_much_better_ours_is() -> None:
    """A ratio above one means that ours is better, for times, rates and memory alike."""
    ours = summarize(actors.OURS, [[0.001], [0.003], [0.002]], [900.0, 1000.0, 5000.0], MEMORY)
    other = summarize(actors.RAY, [[0.008]], [250.0], (MEMORY[0], Memory(5, 2**23, None)))
    assert ours.round_trip_p50_ms.median == pytest.approx(2.0)
    assert ours.sequential_calls_per_s.median == pytest.approx(500.0)
    assert ours.pipelined_calls_per_s == Figure(1000.0, 900.0, 5000.0, 3)
    assert ratios([ours, other]) == {
        actors.RAY: pytest.approx(
            {
                "round_trip_p50": 4.0,
                "round_trip_p99": 4.0,
                "sequential_calls_per_s": 4.0,
                "pipelined_calls_per_s": 4.0,
                "memory_in_all": 4.0,
            }
        )
    }


def test_windows_hold_all_calls() -> None:
    """The last window takes the remaining calls."""
    assert windows(25, 10) == [10, 10, 5]
    assert windows(3, 10) == [3]
    assert windows(20, 10) == [10, 10]


def test_memory_and_time_are_read_from_proc(tmp_path: Path) -> None:
    """Values from /proc are summed; ended processes count nothing; a name with blanks and brackets is no problem."""
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "status").write_text("Name:\tx\nVmRSS:\t    100 kB\n")
    (tmp_path / "1" / "smaps_rollup").write_text("Rss: 100 kB\nPss:    40 kB\nPss_Anon: 1 kB\n")
    fields = " ".join(str(number) for number in range(5, 30))
    (tmp_path / "1" / "stat").write_text(f"1 (a) b) S 9 {fields}")
    assert memory_of([1, 2, 3], tmp_path) == Memory(2, 200 * 1024, 40 * 1024)
    ticks = 14 + 15  # proc(5): utime and stime are fields 14 and 15
    assert cpu_s(1, tmp_path) == pytest.approx(ticks / 100, rel=1e-6)
    assert descendants(9, tmp_path) == [1]


def test_the_whole_measurement_runs_and_writes_its_figures(tmp_path: Path) -> None:
    """Tiny settings give a table and JSON with the figures of every pair."""
    file = tmp_path / "figures.json"
    options = ["--without-ray", "--rounds", "2", "--calls", "5", "--pipelined-calls", "20", "--window", "10"]
    done = run_bench("actors", *options, "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "actorserve to bare pyzmq" in done.stdout
    figures = read_figures(file)
    [table] = figures.tables
    assert [row.name for row in table.rows] == [actors.OURS, actors.PYZMQ]
    assert all(figure is not None and figure.median > 0 for row in table.rows for figure in row.cells)
    assert set(figures.details["ratios"]) == {actors.PYZMQ}


@pytest.mark.parametrize("options", [["--rounds", "0"], ["--window", str(actors.MAX_WINDOW + 1)]])
def test_numbers_out_of_range_are_refused(options: list[str]) -> None:
    """One line names the allowed numbers."""
    done = run_bench("actors", "--without-ray", *options)
    assert done.returncode == 2
    assert done.stderr.startswith("bench: --")
    assert len(done.stderr.splitlines()) == 1

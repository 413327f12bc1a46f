"""tools/bench coordinator: a simulated cluster meets a real coordinator, gets places, and leaves no file behind."""

import argparse
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from actorserve.settings import ClusterSettings
from tests.tools.benchmarks.run_bench import DEADLINE_S, ROOT, bench_command, run_bench
from tools.benchmarks.cluster import coordinator
from tools.benchmarks.cluster.coordinator import AlonePoint, find_limit, join, whole_core
from tools.benchmarks.cluster.coordinator_alone import CoordinatorAlone
from tools.benchmarks.cluster.load_generator import Measured
from tools.benchmarks.common.errors import BenchError
from tools.figures.files import read_figures

MEASURED = Measured(
    asked=100.0,
    answered=99.0,
    num_refused=1,
    p50_s=0.001,
    p99_s=0.01,
    coordinator_cpu=0.2,
    generator_cpu=0.1,
    num_unsent=0,
    num_lost=0,
)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A temporary folder with a path that is short enough for sockets in its folders."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


def test_the_coordinator_alone_places_every_request() -> None:
    """On a virtual clock all processes connect, every request gets a place, and the actor's CPU time is counted."""
    alone = CoordinatorAlone(8, 2, ClusterSettings())
    assert alone.joining_cpu_s > 0.0
    assert alone.cpu_share(200.0, 0.5) > 0.0


def test_a_report_is_measured_while_requests_wait_for_a_full_kind(tmp_path: Path) -> None:
    """The CPU time of a report is saved for each number of workers."""
    file = tmp_path / "figures.json"
    done = run_bench("coordinator", "--waiting", "5", "--workers", "4,6", "--json", str(file))
    assert done.returncode == 0, done.stderr
    waiting = read_figures(file).details["waiting"]
    assert waiting["requests"] == 5
    assert list(waiting["report_cpu_s"]) == ["4", "6"]
    assert min(waiting["report_cpu_s"].values()) > 0.0


@pytest.mark.parametrize("shards", [1, 2])
def test_the_real_coordinator_places_every_request(tmp_path: Path, short_folder: Path, shards: int) -> None:
    """With one coordinator or two, all requests are answered, and neither sockets nor folders remain."""
    file = tmp_path / "figures.json"
    options = ["--workers", "4", "--rates", "50", "--seconds", "0.5", "--no-search", "--json", str(file)]
    done = run_bench("coordinator", *options, "--shards", str(shards), folder=str(short_folder))
    assert done.returncode == 0, done.stderr
    (point,) = read_figures(file).details["points"]
    assert point["num_workers"] == 4
    assert point["asked"] == point["answered"] > 0
    assert (point["num_refused"], point["num_unsent"], point["num_lost"]) == (0, 0, 0)
    assert list(short_folder.iterdir()) == []


def test_in_process_figures_are_written(tmp_path: Path) -> None:
    """The figures hold the CPU time of each rate, and of the rate that fills a core."""
    file = tmp_path / "figures.json"
    options = ["--in-process", "--workers", "4", "--rates", "100,1000", "--seconds", "0.5", "--json", str(file)]
    done = run_bench("coordinator", *options)
    assert done.returncode == 0, done.stderr
    points = read_figures(file).details["in_process"]
    assert [point["rate"] for point in points[:2]] == [100, 1000]
    assert len(points) == 3
    assert all(point["cpu_share"] > 0.0 for point in points)


def test_an_interrupt_ends_everything(short_folder: Path) -> None:
    """Ctrl-C in a long measurement prints one line, ends both processes, and removes their folder."""
    with subprocess.Popen(
        bench_command("coordinator", "--workers", "4", "--rates", "50", "--seconds", "100"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(short_folder)},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the machine's line comes before its processes
        while not list(short_folder.glob("*/*.sock")):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode != 0
    assert errors.splitlines() == ["bench: interrupted before anything was measured"]
    assert list(short_folder.iterdir()) == []


def test_a_rate_is_held_if_answers_come_in_time() -> None:
    """Too few answers or a slow P99 means not held; shards' rates add up, and the worst latency counts."""
    whole = join(4, [MEASURED, MEASURED])
    assert (whole.asked, whole.answered, whole.coordinator_cpu) == (200.0, 198.0, 0.2)
    assert whole.is_held
    few = {field: getattr(MEASURED, field) for field in Measured.__slots__} | {"answered": 90.0}
    assert not join(4, [MEASURED, Measured(**few)]).is_held
    slow = {field: getattr(MEASURED, field) for field in Measured.__slots__} | {"p99_s": 0.06}
    assert not join(4, [MEASURED, Measured(**slow)]).is_held
    none = {field: getattr(MEASURED, field) for field in Measured.__slots__} | {"p50_s": None, "p99_s": None}
    assert not join(4, [Measured(**none)]).is_held


def test_the_limit_is_searched_upward_and_then_between() -> None:
    """The search tries the given rates, then doubled ones, then bisects; it finds 0 if the first rate is too high."""
    asked: list[float] = []

    def is_held(rate: float) -> bool:
        asked.append(rate)
        return rate <= 700.0

    assert find_limit(is_held, (200, 100)) == 700.0
    assert asked == [100, 200, 400, 800, 600, 700, 750]
    assert find_limit(lambda rate: False, (100,)) == 0.0


def test_the_rate_that_fills_a_core_is_extrapolated() -> None:
    """Two rates give the cost of a request and the cost of everything else."""
    assert whole_core([AlonePoint(1, 100.0, 0.2), AlonePoint(1, 200.0, 0.3)]) == pytest.approx(900.0)
    with pytest.raises(BenchError, match="two different --rates"):
        whole_core([AlonePoint(1, 100.0, 0.2)])


@pytest.mark.parametrize("options", [["--workers", "5000"], ["--workers", "1", "--shards", "2"], ["--seconds", "0"]])
def test_numbers_that_cannot_be_are_refused(options: list[str]) -> None:
    """The error says what was expected, before any process starts."""
    parser = argparse.ArgumentParser()
    coordinator.add_arguments(parser)
    with pytest.raises(BenchError, match="must be"):
        coordinator.run(parser.parse_args(options))

"""What a person sees while runs take their time."""

import gc
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from actorserve.sim.simulation import Simulation
from tests.sim.experiments import EXPERIMENT, write
from tools.simulation.experiment import read_experiment
from tools.simulation.progress import ProgressLines
from tools.simulation.runner import Progress, run_once


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(folder: Path, is_terminal: bool, updates: list[tuple[float, Progress]]) -> str:
    """What is printed for updates at these times."""
    experiment = read_experiment(write(folder, EXPERIMENT), {"seeds": [4]})
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=100, color_system=None)
    with ProgressLines(experiment, console, clock) as lines:
        for at_s, progress in updates:
            clock.now = at_s
            lines.report(progress)
    return out.getvalue()


def test_a_long_run_prints_a_line_now_and_then(tmp_path: Path) -> None:
    """Without a terminal a line tells every 30 s how much is done, and how long the rest will take at that speed."""
    updates = [
        (0.0, Progress(0, 0.5, 0.0, 0)),
        (10.0, Progress(0, 0.5, 0.05, 0)),
        (40.0, Progress(0, 0.5, 0.1, 0)),
        (45.0, Progress(0, 0.5, 0.15, 0)),
        (4000.0, Progress(0, 0.5, 0.4, 0)),
        (9000.0, Progress(0, 0.5, 1.0, 1)),
        (9000.0, Progress(0, 2.0, 0.0, 1)),
        (9031.0, Progress(0, 2.0, 0.5, 1)),
    ]
    assert shown(tmp_path, False, updates).splitlines() == [
        "simulating 2 cases on 1 instance",
        "fcfs seed 4 at 0.5/s: 10%, about 6 min left",
        "fcfs seed 4 at 0.5/s: 40%, about 1 h 40 min left",
        "fcfs seed 4 at 0.5/s: done",
        "fcfs seed 4 at 2/s: 50%, about 31 s left",
    ]


def test_a_terminal_shows_a_bar_with_the_time_left(tmp_path: Path) -> None:
    """On a terminal each case has a bar, which begins again with the case's next run."""
    updates = [(0.0, Progress(0, 0.5, 0.0, 0)), (1.0, Progress(0, 0.5, 0.5, 0)), (2.0, Progress(0, 2.0, 0.0, 1))]
    updates.insert(2, (2.0, Progress(0, 0.5, 1.0, 1)))
    out = shown(tmp_path, True, updates)
    assert "fcfs seed 4 at 2/s" in out
    assert "1 run done" in out
    assert "left:" in out
    assert "simulating" not in out


def test_a_run_begins_once(tmp_path: Path) -> None:
    """The time left counts from the begin of the run, though no request may end for a long time."""
    updates = [
        (0.0, Progress(0, 0.5, 0.0, 0)),
        (100.0, Progress(0, 0.5, 0.0, 0)),
        (200.0, Progress(0, 0.5, 0.5, 0)),
    ]
    assert shown(tmp_path, False, updates).splitlines()[1:] == ["fcfs seed 4 at 0.5/s: 50%, about 3 min left"]


def test_runs_of_a_second_process_are_told(tmp_path: Path) -> None:
    """A case that is run again, at the best rate of another arm, counts its runs from 0, and each of them is told."""
    updates = [
        (0.0, Progress(0, 0.5, 0.0, 0)),
        (1.0, Progress(0, 0.5, 1.0, 1)),
        (1.0, Progress(0, 2.0, 0.0, 1)),
        (2.0, Progress(0, 2.0, 1.0, 2)),
        (2.0, Progress(0, 1.0, 0.0, 0)),
        (3.0, Progress(0, 1.0, 1.0, 1)),
    ]
    rates = ("0.5", "2", "1")
    assert shown(tmp_path, False, updates).splitlines()[1:] == [f"fcfs seed 4 at {rate}/s: done" for rate in rates]
    assert "3 runs done" in shown(tmp_path, True, updates)


def test_the_replay_of_a_trace_tells_its_progress(tmp_path: Path) -> None:
    """Without a number of requests, the share of a run is that of the trace's rows."""
    rows = [f"2023-11-16 18:{minute:02}:{second:02},4,2" for minute in range(20) for second in range(0, 60, 3)]
    (tmp_path / "t.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    text = EXPERIMENT[: EXPERIMENT.index("[search]")].replace("num_requests = 40", 'trace = "t.csv"')
    text = text.replace('process = "gamma"\ncv = 2.0', 'process = "trace"')
    text = text.replace('prompt = "uniform:1:30"\noutput = "uniform:1:30"', 'like = "trace"')
    case = read_experiment(write(tmp_path, text), {}).cases[0]
    shares: list[float] = []
    run_once(case, None, shares.append)
    assert shares == sorted(shares)
    assert any(0.4 < share < 0.6 for share in shares)
    assert shares[-1] == 1.0


@contextmanager
def without_collection() -> Iterator[None]:
    """As in the processes that run cases."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_run_leaves_nothing_behind(tmp_path: Path) -> None:
    """After a run its simulation is gone, and with it the file of its ended requests."""
    text = EXPERIMENT[: EXPERIMENT.index("[search]")].replace("cv = 2.0", "cv = 2.0\nrate_per_s = 0.3")
    case = read_experiment(write(tmp_path, text), {"num_requests": 3}).cases[0]
    with without_collection():
        run_once(case, None, lambda share: None)
        assert not any(type(found) is Simulation for found in gc.get_objects())

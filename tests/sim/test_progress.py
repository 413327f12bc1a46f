"""What a person sees while runs take their time."""

import io
from pathlib import Path

from rich.console import Console

from tests.sim.experiments import EXPERIMENT, write
from tools.simulation.experiment import read_experiment
from tools.simulation.progress import ProgressLines
from tools.simulation.runner import Progress


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
        "simulating 2 case(s) on 1 instance(s)",
        "fcfs seed 4 at 0.5/s: 10%, about 6 min left",
        "fcfs seed 4 at 0.5/s: 40%, about 1 h 40 min left",
        "fcfs seed 4 at 0.5/s: done",
        "fcfs seed 4 at 2/s: 50%, about 31 s left",
    ]


def test_a_terminal_shows_a_bar_with_the_time_left(tmp_path: Path) -> None:
    """On a terminal each case has a bar, which begins again with the case's next run."""
    updates = [(0.0, Progress(0, 0.5, 0.0, 0)), (1.0, Progress(0, 0.5, 0.5, 0)), (2.0, Progress(0, 2.0, 0.0, 1))]
    out = shown(tmp_path, True, updates)
    assert "fcfs seed 4 at 2/s" in out
    assert "1 runs done" in out
    assert "left:" in out
    assert "simulating" not in out

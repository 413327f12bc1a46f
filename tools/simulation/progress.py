"""What a person sees while runs take their time."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress as Bars, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tools.simulation.experiment import Case, Experiment
from tools.simulation.runner import Progress

_LINE_EVERY_S = 30.0


class ProgressLines:
    """On a terminal, a bar for each case that has begun, with the time that its run will still take. Otherwise a line
    at the start, one for each finished run, and, for a long run, one now and then.
    """

    def __init__(
        self, experiment: Experiment, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock`` gives seconds; it decides when a line is due."""
        self._cases = experiment.cases
        self._console = console or Console(stderr=True)
        self._clock = clock
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[at]}"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
        )
        self._bars = Bars(*columns, console=self._console, transient=True)
        self._tasks: dict[int, TaskID] = {}  # by case
        self._rates: dict[int, float | None] = {}  # of each case's newest run
        self._num_runs = [0] * len(self._cases)  # as the case's process counts them; a second one counts from 0
        self._num_done = [0] * len(self._cases)  # of all processes
        self._began_s = [clock()] * len(self._cases)  # the newest run of each case
        self._told_s = [clock()] * len(self._cases)

    def __enter__(self) -> "ProgressLines":
        if self._console.is_terminal:
            self._bars.start()
        else:
            instances = max(case.config.cluster.num_workers for case in self._cases)
            self._print(f"simulating {counted(len(self._cases), 'case')} on {counted(instances, 'instance')}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def report(self, progress: Progress) -> None:
        number, rate = progress.case, progress.rate_per_s
        name = name_of(self._cases[number], rate)
        begins = number not in self._rates or self._rates[number] != rate
        if begins:
            self._rates[number], self._num_runs[number] = rate, progress.num_runs
        is_done = progress.num_runs > self._num_runs[number]
        if is_done:
            self._num_runs[number] = progress.num_runs
            self._num_done[number] += 1
        if self._console.is_terminal:
            self._draw(name, progress, begins)
        else:
            self._tell(name, progress, begins, is_done)

    def _draw(self, name: str, progress: Progress, begins: bool) -> None:
        number = progress.case
        if number not in self._tasks:
            self._tasks[number] = self._bars.add_task(name, total=1.0, at="")
        elif begins:
            self._bars.reset(self._tasks[number], description=name)
        done = self._num_done[number]
        at = f"{counted(done, 'run')} done" if done else ""
        self._bars.update(self._tasks[number], completed=progress.share, at=at)

    def _tell(self, name: str, progress: Progress, begins: bool, is_done: bool) -> None:
        number, now = progress.case, self._clock()
        if begins:
            self._began_s[number] = self._told_s[number] = now
        if is_done:
            self._print(f"{name}: done")
        elif progress.share and now - self._told_s[number] >= _LINE_EVERY_S:
            self._told_s[number] = now
            left_s = (now - self._began_s[number]) * (1.0 - progress.share) / progress.share
            self._print(f"{name}: {progress.share:.0%}, about {_duration(left_s)} left")

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False)


def counted(number: int, noun: str) -> str:
    """As "1 run" and "2 runs"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def name_of(case: Case, rate_per_s: float | None) -> str:
    """A run's name for people."""
    parts = [case.variant, case.arm, "" if case.seed is None else f"seed {case.seed}"]
    name = " ".join(part for part in parts if part) or "run"
    return name if rate_per_s is None else f"{name} at {rate_per_s:.3g}/s"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes > 2 else f"{60 * minutes + seconds} s"

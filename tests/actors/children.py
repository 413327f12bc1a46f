"""Small scripts as a supervisor's children, and a listener that keeps the supervisor's news."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from actorserve.actors.supervisor import Supervisor
from actorserve.processes.restarts import RestartLimits
from actorserve.processes.status import Phase
from actorserve.processes.supervision import AllReady, ChildSpec, News, Progress, SupervisionTree

DEADLINE_S = 30.0
LIMITS = RestartLimits(max_restarts=2, window_s=60.0, backoff_s=0.01, max_backoff_s=0.02)
PRELUDE = """
import os, pathlib, signal, sys
from actorserve.processes import status
report = status.attach()
here = pathlib.Path(sys.argv[1])
name = sys.argv[2]
def note(text):
    with (here / "log").open("a") as log:
        log.write(f"{name} {text}\\n")
def end(*_):
    note("ended")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
"""
WELL_BEHAVED = "report.loading('loading', 0.5)\nreport.ready()\nsignal.pause()\n"


class Recorder:
    """A listener that keeps the news, and lets a test wait for what it is to hear."""

    def __init__(self) -> None:
        self.news: list[News] = []
        self._changed = asyncio.Condition()
        self._notifying: set[asyncio.Task[None]] = set()

    def show(self, news: News) -> None:
        self.news.append(news)
        task = asyncio.get_running_loop().create_task(self._notify())
        self._notifying.add(task)
        task.add_done_callback(self._notifying.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, heard: Callable[[list[News]], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(lambda: heard(self.news))

    def count(self, name: str, phase: Phase) -> int:
        """How many reports of this phase that child has sent."""
        reports = [news.report for news in self.news if isinstance(news, Progress) and news.name == name]
        return sum(report.phase is phase for report in reports)


def are_ready(news: list[News]) -> bool:
    return AllReady() in news


def supervisor_of(specs: Sequence[ChildSpec], recorder: Recorder, drain_timeout_s: float = 5.0) -> Supervisor:
    return Supervisor(SupervisionTree(tuple(specs), (), LIMITS, drain_timeout_s), recorder)


def script(folder: Path, name: str, body: str, stop_stage: int = 1) -> ChildSpec:
    command = (sys.executable, "-c", PRELUDE + body, str(folder), name)
    return ChildSpec(name, command, stop_stage)


def log_of(folder: Path) -> list[str]:
    return (folder / "log").read_text(encoding="utf-8").splitlines()


async def run_until(supervisor: Supervisor, recorder: Recorder, heard: Callable[[list[News]], bool]) -> None:
    """Run the supervisor, shut it down when that was heard, and wait for its end."""
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await recorder.until(heard)
        supervisor.shut_down()

"""The supervisor's spare children: started on request, and spare again when they stop."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from actorserve.actors.supervisor import ChildFailedError, Supervisor
from actorserve.processes.status import Phase
from actorserve.processes.supervision import Adding, AllReady, ChildSpec, News, Removed, Restarting, SupervisionTree
from tests.actors.children import (
    DEADLINE_S,
    LIMITS,
    WELL_BEHAVED,
    Recorder,
    are_ready,
    log_of,
    run_until,
    script,
    supervisor_of,
)

ASKS = """
import time
signal.signal(status.NO_WORKER, lambda *_: note('got none'))
for word in ['first', 'second', 'third']:
    while not (here / word).exists(): time.sleep(0.01)
    report.want_worker()
    if word == 'first': report.ready()
while True: signal.pause()
"""  # it asks when a file with the name of the word exists
STOPS = """
import time
report.ready()
while not (here / 'stop').exists(): time.sleep(0.01)
(here / 'stop').unlink()
report.stopped('not needed')
"""


def _ready(recorder: Recorder, name: str, times: int = 1) -> Callable[[list[News]], bool]:
    return lambda news: recorder.count(name, Phase.READY) == times


def _added(recorder: Recorder) -> list[str]:
    return [news.name for news in recorder.news if isinstance(news, Adding)]


def _num_restarts(recorder: Recorder) -> int:
    return sum(isinstance(news, Restarting) for news in recorder.news)


def _supervisor(folder: Path, recorder: Recorder, *spare: ChildSpec) -> Supervisor:
    (folder / "first").touch()
    specs = [script(folder, "c", ASKS), script(folder, "w-0", WELL_BEHAVED)]
    return Supervisor(SupervisionTree(tuple(specs), spare, LIMITS, 5.0), recorder)


async def _noted(folder: Path, lines: list[str]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not (folder / "log").exists() or log_of(folder) != lines:  # noqa: ASYNC110 -- another process writes it
            await asyncio.sleep(0.01)


async def test_a_spare_child_is_started_when_one_is_asked_for(tmp_path: Path) -> None:
    """A request starts the first spare child. It ends with the other children, and AllReady comes once."""
    recorder = Recorder()
    spare = [script(tmp_path, f"w-{number}", WELL_BEHAVED) for number in (1, 2)]
    supervisor = _supervisor(tmp_path, recorder, *spare)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await recorder.until(_ready(recorder, "w-1"))
        (tmp_path / "second").touch()
        await recorder.until(_ready(recorder, "w-2"))
        supervisor.shut_down()
    assert _added(recorder) == ["w-1", "w-2"]
    assert recorder.news.count(AllReady()) == 1
    assert sorted(log_of(tmp_path)) == [f"{name} ended" for name in ("c", "w-0", "w-1", "w-2")]


async def test_without_spare_children_nothing_is_started(tmp_path: Path) -> None:
    """If no spare child is left, a request starts nothing, and the child that asked is told every time."""
    recorder = Recorder()
    supervisor = _supervisor(tmp_path, recorder, script(tmp_path, "w-1", WELL_BEHAVED))
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await recorder.until(lambda news: _ready(recorder, "w-1")(news) and are_ready(news))
        for number, word in enumerate(["second", "third"], start=1):
            (tmp_path / word).touch()
            await _noted(tmp_path, ["c got none"] * number)
        supervisor.shut_down()
    assert _added(recorder) == ["w-1"]


async def test_a_child_that_stops_on_purpose_is_not_restarted(tmp_path: Path) -> None:
    """Its stop is not a failure, the other children go on, and the next request for a worker starts it again."""
    recorder = Recorder()
    specs = [script(tmp_path, "c", ASKS), script(tmp_path, "w-0", STOPS)]
    supervisor = Supervisor(
        SupervisionTree(tuple(specs), (script(tmp_path, "w-1", WELL_BEHAVED),), LIMITS, 5.0), recorder
    )
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await recorder.until(_ready(recorder, "w-0"))
        for times, word in enumerate(["first", "second", "third"], start=1):
            (tmp_path / "stop").touch()
            removed = Removed("w-0", "w-0 has stopped: not needed")
            await recorder.until(lambda news, r=removed, n=times: news.count(r) == n)  # type: ignore[misc]
            (tmp_path / word).touch()
            await recorder.until(_ready(recorder, "w-0", times + 1))
        supervisor.shut_down()
    assert _added(recorder) == ["w-0"] * 3
    assert _num_restarts(recorder) == 0
    assert recorder.count("w-0", Phase.STOPPED) > 0


@pytest.mark.parametrize("last_act", ["sys.exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
async def test_a_stop_that_fails_is_a_failure(tmp_path: Path, last_act: str) -> None:
    """A child that reports that it stops and then ends badly is restarted."""
    recorder = Recorder()
    body = f"report.ready()\nreport.stopped('not needed')\n{last_act}\n"
    supervisor = supervisor_of([script(tmp_path, "w", body)], recorder)
    with pytest.raises(ChildFailedError, match="that was failure 3"):
        async with asyncio.timeout(DEADLINE_S):
            await supervisor.run()


async def test_a_spare_child_that_cannot_start_ends_nothing_else(tmp_path: Path) -> None:
    """The reason is reported, the asking child gets a signal, the others go on, and the next request tries again."""
    recorder = Recorder()
    failing = script(tmp_path, "w-1", "report.failed('no space'); sys.exit(3)\n")
    supervisor = _supervisor(tmp_path, recorder, failing)
    removed = Removed("w-1", "w-1 could not start: no space")
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await recorder.until(lambda news: removed in news and are_ready(news))
        await _noted(tmp_path, ["c got none"])
        (tmp_path / "second").touch()
        await recorder.until(lambda news: news.count(removed) == 2)
        await _noted(tmp_path, ["c got none"] * 2)
        supervisor.shut_down()
    assert sorted(log_of(tmp_path)) == ["c ended", "c got none", "c got none", "w-0 ended"]


async def test_a_spare_child_that_keeps_dying_ends_nothing_else(tmp_path: Path) -> None:
    """The spare child is restarted like any other, and given up without ending the other children."""
    recorder = Recorder()
    dying = script(tmp_path, "w-1", "report.ready()\nreport.failed('bad luck')\nsys.exit(1)\n")
    removed = Removed("w-1", "w-1 failed: bad luck; that was failure 3 in 60 s")
    await run_until(_supervisor(tmp_path, recorder, dying), recorder, lambda news: removed in news)
    assert _num_restarts(recorder) == LIMITS.max_restarts


async def test_nothing_is_started_while_stopping(tmp_path: Path) -> None:
    """A request for a worker after ``shut_down`` starts no child."""
    recorder = Recorder()
    asks = "def end(*_):\n    report.want_worker()\n    note('ended')\n    sys.exit(0)\n"
    asks += "signal.signal(signal.SIGTERM, end)\nreport.ready()\nsignal.pause()\n"
    spare = script(tmp_path, "w-0", WELL_BEHAVED)
    supervisor = Supervisor(SupervisionTree((script(tmp_path, "c", asks),), (spare,), LIMITS, 5.0), recorder)
    await run_until(supervisor, recorder, are_ready)
    assert log_of(tmp_path) == ["c ended"]
    assert _added(recorder) == []

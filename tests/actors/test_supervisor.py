"""The supervisor with small scripts as children: their starts, restarts and ends."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from actorserve.actors.supervisor import ChildFailedError, Supervisor
from actorserve.processes.restarts import RestartLimits
from actorserve.processes.status import Phase, describe_exit
from actorserve.processes.supervision import AllReady, ChildSpec, Restarting, Stopping, SupervisionTree
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

STUBBORN = "signal.signal(signal.SIGTERM, lambda *_: note('asked'))\nreport.ready()\nwhile True: signal.pause()\n"
DIES_ONCE = """
first = not (here / 'lived').exists()
(here / 'lived').touch()
report.ready()
if first: os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""


async def test_children_start_and_end_in_order(tmp_path: Path) -> None:
    """All children become ready. At the end, those of stage 0 have ended before the others are told to."""
    recorder = Recorder()
    specs = [script(tmp_path, "worker", WELL_BEHAVED), script(tmp_path, "gateway", WELL_BEHAVED, stop_stage=0)]
    await run_until(supervisor_of(specs, recorder), recorder, are_ready)
    assert log_of(tmp_path) == ["gateway ended", "worker ended"]
    assert recorder.count("worker", Phase.LOADING) > 0
    assert recorder.news.count(AllReady()) == 1


async def test_a_child_that_fails_to_start_ends_everything(tmp_path: Path) -> None:
    """A child that dies before it was ready ends the others, and the error contains its own report."""
    specs = [script(tmp_path, "a", WELL_BEHAVED), script(tmp_path, "b", "report.failed('no space'); sys.exit(3)\n")]
    with pytest.raises(ChildFailedError) as caught:
        async with asyncio.timeout(DEADLINE_S):
            await supervisor_of(specs, Recorder()).run()
    assert str(caught.value) == "b could not start: no space"


async def test_a_child_that_says_nothing_is_described(tmp_path: Path) -> None:
    """If a child is killed before it was ready, the error names the signal."""
    specs = [script(tmp_path, "b", "os.kill(os.getpid(), signal.SIGKILL)\n")]
    with pytest.raises(ChildFailedError, match="b could not start: it was killed by SIGKILL"):
        await supervisor_of(specs, Recorder()).run()


async def test_a_program_that_does_not_exist_is_described() -> None:
    """A child whose program is missing ends all children with an error that says so."""
    specs = [ChildSpec("b", ("/nowhere/at/all",), 0)]
    with pytest.raises(ChildFailedError, match=r"b could not start: it cannot be run \(No such file"):
        await supervisor_of(specs, Recorder()).run()


async def test_a_child_that_dies_later_is_restarted(tmp_path: Path) -> None:
    """A child that is killed after it was ready is started again after the backoff, and becomes ready again."""
    recorder = Recorder()
    supervisor = supervisor_of([script(tmp_path, "w", DIES_ONCE)], recorder)
    await run_until(supervisor, recorder, lambda news: recorder.count("w", Phase.READY) == 2)
    assert Restarting("w", "was killed by SIGKILL", LIMITS.backoff_s) in recorder.news
    assert recorder.news.count(AllReady()) == 1
    assert log_of(tmp_path) == ["w ended"]


async def test_a_child_that_keeps_dying_is_given_up(tmp_path: Path) -> None:
    """After more failures than the limits allow, the other children are ended, and the error has the last failure."""
    recorder = Recorder()
    dies = script(tmp_path, "w", "report.ready()\nreport.failed('bad luck')\nsys.exit(1)\n")
    supervisor = supervisor_of([script(tmp_path, "other", WELL_BEHAVED), dies], recorder)
    with pytest.raises(ChildFailedError, match="w failed: bad luck; that was failure 3 in 60 s"):
        async with asyncio.timeout(DEADLINE_S):
            await supervisor.run()
    delays = [news.after_s for news in recorder.news if isinstance(news, Restarting)]
    assert delays == [0.01, 0.02]


async def test_a_second_shut_down_ends_at_once(tmp_path: Path) -> None:
    """A child that would drain forever is killed by a second ``shut_down``."""
    recorder = Recorder()
    supervisor = supervisor_of([script(tmp_path, "g", STUBBORN, stop_stage=0)], recorder, 10_000.0)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await recorder.until(are_ready)
        supervisor.shut_down()
        await recorder.until(lambda news: Stopping(1) in news)
        supervisor.shut_down()
    assert supervisor.was_killed


async def test_a_shut_down_during_a_backoff_ends_without_another_life(tmp_path: Path) -> None:
    """A child that waits for its restart when the supervisor shuts down is not started."""
    recorder = Recorder()
    limits = RestartLimits(max_restarts=5, window_s=60.0, backoff_s=10_000.0, max_backoff_s=10_000.0)
    supervisor = Supervisor(SupervisionTree((script(tmp_path, "w", DIES_ONCE),), (), limits, 5.0), recorder)
    await run_until(supervisor, recorder, lambda news: any(isinstance(item, Restarting) for item in news))
    assert recorder.count("w", Phase.READY) == 1


DRAINS = """
def drain(*_):
    note('drains')
    while not (here / 'done').exists(): time.sleep(0.01)
    end()
import time
signal.signal(signal.SIGTERM, drain)
report.ready()
signal.pause()
"""


async def test_a_child_that_dies_while_another_drains_is_restarted(tmp_path: Path) -> None:
    """While stage 0 drains, a child of stage 1 that dies is started again. It is told to end after stage 0."""
    recorder = Recorder()
    worker = "note(f'pid {os.getpid()}')\n" + WELL_BEHAVED
    specs = [script(tmp_path, "g", DRAINS, stop_stage=0), script(tmp_path, "w", worker)]
    supervisor = supervisor_of(specs, recorder, 10_000.0)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await recorder.until(are_ready)
        supervisor.shut_down()
        await recorder.until(lambda news: Stopping(2) in news)
        os.kill(int(log_of(tmp_path)[0].removeprefix("w pid ")), signal.SIGKILL)
        await recorder.until(lambda news: recorder.count("w", Phase.READY) == 2)
        (tmp_path / "done").touch()
    assert Restarting("w", "was killed by SIGKILL", LIMITS.backoff_s) in recorder.news
    assert [line for line in log_of(tmp_path) if "pid" not in line] == ["g drains", "g ended", "w ended"]


@pytest.mark.parametrize(
    ("last_act", "how"),
    [
        ("report.failed('2 were not finished'); sys.exit(1)", "2 were not finished"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "it was killed by SIGKILL before it had finished"),
    ],
)
async def test_a_drain_that_was_not_finished_is_told(tmp_path: Path, last_act: str, how: str) -> None:
    """If a child of stage 0 ends badly when told to end, run raises after the other children have ended."""
    body = f"def drain(*_):\n    {last_act}\nsignal.signal(signal.SIGTERM, drain)\nreport.ready()\nsignal.pause()\n"
    specs = [script(tmp_path, "g", body, stop_stage=0), script(tmp_path, "w", WELL_BEHAVED)]
    recorder = Recorder()
    supervisor = supervisor_of(specs, recorder)
    async with asyncio.timeout(DEADLINE_S):
        running = asyncio.create_task(supervisor.run())
        await recorder.until(are_ready)
        supervisor.shut_down()
        with pytest.raises(ChildFailedError, match=f"g: {how}"):
            await running
    assert log_of(tmp_path) == ["w ended"]


async def test_a_terminals_ctrl_c_does_not_reach_children(tmp_path: Path) -> None:
    """A child has its own process group, so a terminal's Ctrl-C does not reach it."""
    recorder = Recorder()
    body = "note(f'group {os.getpgrp()}')\n" + WELL_BEHAVED
    await run_until(
        supervisor_of([script(tmp_path, "w", body)], recorder),
        recorder,
        are_ready,
    )
    assert log_of(tmp_path)[0] != f"w group {os.getpgrp()}"


def test_exits_are_told_in_words() -> None:
    """Return codes become an exit status or a signal's name."""
    assert describe_exit(2) == "ended with exit status 2"
    assert describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert describe_exit(-200) == "was killed by signal 200"

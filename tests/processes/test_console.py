"""The lines about workers that start and stop while the server runs."""

from io import StringIO

from rich.console import Console

from actorserve.processes.console import ProgressDisplay, StartDisplay
from actorserve.processes.status import Phase, Status
from actorserve.processes.supervision import Adding, AllReady, News, Progress, Removed, Restarting


def test_workers_that_come_and_go_are_told() -> None:
    """Lines say that a worker is started, is ready, and has stopped; only a restarted worker is "ready again"."""
    screen = StringIO()
    display = StartDisplay(ProgressDisplay(Console(file=screen, force_terminal=False)), "usage\n", StringIO())
    news: list[News] = [
        AllReady(),
        Adding("worker-2"),
        Progress("worker-2", Status(Phase.LOADING, "loading", 0.5)),
        Progress("worker-2", Status(Phase.READY)),
        Restarting("worker-2", "was killed by SIGKILL", 0.2),
        Progress("worker-2", Status(Phase.READY)),
        Progress("worker-2", Status(Phase.STOPPED, "it is not needed now")),
        Removed("worker-2", "worker-2 has stopped: it is not needed now"),
    ]
    for item in news:
        display.show(item)
    assert screen.getvalue().splitlines() == [
        "starting worker-2",
        "worker-2 is ready",
        "worker-2 was killed by SIGKILL; starting it again in 0.2 s",
        "worker-2 is ready again",
        "worker-2 has stopped: it is not needed now",
    ]

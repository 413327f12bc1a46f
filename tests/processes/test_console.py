"""What a person is told of workers that come and go while the server runs."""

from io import StringIO

from rich.console import Console

from actorserve.processes.console import ProgressDisplay, StartDisplay
from actorserve.processes.status import Phase, Status


def test_workers_that_come_and_go_are_told() -> None:
    """A line says that a worker is started, that it is ready, that it has stopped; and "again" only of a restart."""
    screen = StringIO()
    display = StartDisplay(ProgressDisplay(Console(file=screen, force_terminal=False)), "usage\n", StringIO())
    display.all_ready()
    display.adding("worker-2")
    display.progress("worker-2", Status(Phase.LOADING, "loading", 0.5))
    display.progress("worker-2", Status(Phase.READY))
    display.restarting("worker-2", "was killed by SIGKILL", 0.2)
    display.progress("worker-2", Status(Phase.READY))
    display.progress("worker-2", Status(Phase.STOPPED, "it is not needed now"))
    display.removed("worker-2", "worker-2 has stopped: it is not needed now")
    assert screen.getvalue().splitlines() == [
        "starting worker-2",
        "worker-2 is ready",
        "worker-2 was killed by SIGKILL; starting it again in 0.2 s",
        "worker-2 is ready again",
        "worker-2 has stopped: it is not needed now",
    ]

"""What systemd hears of a process, through a real datagram socket as in ``$NOTIFY_SOCKET``."""

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actorserve.processes.status import MAX_TEXT_CHARS, Phase, Status
from actorserve.processes.supervision import Adding, AllReady, News, Progress, Removed, Restarting, Stopping
from actorserve.processes.units.systemd import attach_to_systemd
from actorserve.processes.units.unit_news import UnitNews

DEADLINE_S = 20.0


class Listening:
    """systemd's end of the socket."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0"))
        self.socket.settimeout(DEADLINE_S)
        self.environment = {"NOTIFY_SOCKET": address, "HOME": "/"}

    def heard(self) -> dict[str, str]:
        """The assignments of the next datagram."""
        lines = self.socket.recv(4 * MAX_TEXT_CHARS).decode().split("\n")
        return dict(line.split("=", 1) for line in lines)

    def is_silent(self) -> bool:
        self.socket.setblocking(False)
        try:
            self.socket.recv(1)
        except BlockingIOError:
            self.socket.settimeout(DEADLINE_S)
            return True
        return False


@pytest.fixture(params=["path", "abstract"])
def listening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listening]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@actorserve-test-{os.getpid()}"
    listening = Listening(address)
    with listening.socket:
        yield listening


def test_the_steps_of_a_start_are_told(listening: Listening) -> None:
    """Each step of a start shows as the unit's state and gives it more time, and READY names the main process."""
    reporter = attach_to_systemd(listening.environment)
    assert listening.environment == {"HOME": "/"}, "the process's own children would inherit the socket"
    reporter.loading("loading the\nweights", 0.41)
    assert listening.heard() == {"STATUS": "loading the weights, 41%", "EXTEND_TIMEOUT_USEC": "600000000"}
    reporter.loading("waiting for a worker")
    assert listening.heard()["STATUS"] == "waiting for a worker"
    reporter.ready()
    assert listening.heard() == {"READY": "1", "MAINPID": str(os.getpid()), "STATUS": "ready"}


def test_a_fast_step_is_told_once_a_second(listening: Listening) -> None:
    """A step that reports its progress thousands of times a second does not flood systemd."""
    reporter = attach_to_systemd(listening.environment)
    for done in range(1000):
        reporter.loading("downloading the model", done / 1000)
    assert listening.heard()["STATUS"] == "downloading the model, 0%"
    assert listening.is_silent()


def test_the_end_is_told_with_the_time_that_it_may_take(listening: Listening) -> None:
    """A process that drains asks for the time to drain and to end, and one that ends on purpose or fails says why."""
    reporter = attach_to_systemd(listening.environment)
    reporter.stopping(30.0)
    assert listening.heard() == {"STOPPING": "1", "STATUS": "stopping", "EXTEND_TIMEOUT_USEC": "45000000"}
    reporter.stopped("it is not needed now")
    assert listening.heard() == {"STOPPING": "1", "STATUS": "it is not needed now"}
    reporter.failed("no memory")
    assert listening.heard() == {"STATUS": "no memory"}
    assert not reporter.is_heard, "a failure must also be logged"


async def test_the_event_loop_feeds_the_watchdog(listening: Listening) -> None:
    """From READY on the loop says WATCHDOG twice in each period, and nothing while it is stuck."""
    reporter = attach_to_systemd(listening.environment | {"WATCHDOG_USEC": "400000", "WATCHDOG_PID": str(os.getpid())})
    assert listening.is_silent()
    reporter.ready()
    assert listening.heard()["READY"] == "1"
    assert listening.heard() == {"WATCHDOG": "1"}
    began = time.monotonic()
    for _ in range(3):
        assert await asyncio.to_thread(listening.heard) == {"WATCHDOG": "1"}
    assert time.monotonic() - began >= 2 * 0.2
    time.sleep(0.5)  # noqa: ASYNC251 - the loop is stuck
    assert listening.is_silent()


@pytest.mark.parametrize("watchdog", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}])
async def test_no_watchdog_is_fed_unless_this_process_is_watched(
    listening: Listening, watchdog: dict[str, str]
) -> None:
    """Without WatchdogSec, or with it for another process, nothing follows READY."""
    attach_to_systemd(listening.environment | watchdog).ready()
    listening.heard()
    await asyncio.sleep(0.01)
    assert listening.is_silent()


@pytest.mark.parametrize("address", ["", "relative", "/no/such/socket", "@actorserve-nothing-listens"])
def test_a_process_without_systemd_goes_on(address: str) -> None:
    """Without a socket, or with one that nothing reads, reports are no error."""
    reporter = attach_to_systemd({"NOTIFY_SOCKET": address})
    reporter.loading("x")
    reporter.stopping(1.0)


def test_the_supervisors_news_reach_systemd(listening: Listening) -> None:
    """A supervised server is one unit: its children's steps, restarts and end are the unit's state."""
    shown: list[News] = []
    news = UnitNews(shown.append, attach_to_systemd(listening.environment), 30.0)
    told: list[tuple[News, str]] = [
        (Progress("worker-0", Status(Phase.LOADING, "loading", 0.5)), "worker-0: loading, 50%"),
        (Progress("worker-0", Status(Phase.READY)), "worker-0 is ready"),
        (AllReady(), "ready"),
        (
            Restarting("worker-0", "was killed by SIGKILL", 1.0),
            "worker-0 was killed by SIGKILL; it is being started again",
        ),
        (Adding("worker-1"), "starting worker-1"),
        (Removed("worker-1", "worker-1 has stopped: it is idle"), "worker-1 has stopped: it is idle"),
        (Stopping(3), "stopping"),
    ]
    for item, status in told:
        news.show(item)
        assert listening.heard()["STATUS"] == status
    assert shown == [item for item, _ in told]

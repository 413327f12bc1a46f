"""SIGHUP has a process read again what may change, and its supervisor passes it on."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from actorserve.core.messages import Tick
from actorserve.errors import SettingsError
from actorserve.processes.reload import Hangup, Reloads
from actorserve.processes.supervision import ChildReported, Reload, SignalChild
from actorserve.processes.supervisor_state import SupervisorState
from tests.processes.trees import READY, TREE


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def _hang_up() -> None:
    os.kill(os.getpid(), signal.SIGHUP)


async def test_all_parts_read_their_files_again(caplog: pytest.LogCaptureFixture) -> None:
    """A part whose file is wrong is named in the log, and the others reload all the same, at each SIGHUP."""
    caplog.set_level(logging.INFO, logger="actorserve.processes")
    reloaded = asyncio.Event()

    def broken() -> None:
        raise SettingsError("line 3 of keys.toml")

    reloads = Reloads()
    reloads.add("broken keys", broken)
    reloads.add("good keys", reloaded.set)
    reloads.start()
    for _ in range(2):
        _hang_up()
        await asyncio.wait_for(reloaded.wait(), 5.0)
        reloaded.clear()
    asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["broken keys could not be read again, so they stay as they were: line 3 of keys.toml"] * 2


def test_a_reload_names_what_stayed_as_it_was() -> None:
    """``run`` returns the names of what was read and of what could not be read, so that an operator can be told."""

    def unreadable() -> None:
        raise PermissionError(13, "Permission denied")

    reloads = Reloads()
    reloads.add("keys", unreadable)
    reloads.add("certificate", lambda: None)
    assert reloads.run() == (["certificate"], ["keys"])


async def test_a_hangup_during_the_start_is_not_lost() -> None:
    """A SIGHUP that comes while the process loads does not end it, and takes effect once it has started."""
    reloads = Reloads()
    reloads.catch_early()
    _hang_up()
    calls: list[str] = []
    reloads.add("keys", lambda: calls.append("keys"))
    assert calls == []
    reloads.start()
    asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
    assert calls == ["keys"]


def test_the_supervisor_passes_a_reload_on() -> None:
    """A child that has reported gets the SIGHUP at once; one that has not gets it with its first report, because it
    could not handle it before.
    """
    state = SupervisorState(TREE)
    state.handle(Tick(), 0.0)
    first, *others = TREE.children
    state.handle(ChildReported(first.name, READY), 0.0)
    assert state.handle(Reload(), 1.0) == [SignalChild(first.name, signal.SIGHUP)]
    for spec in others:
        assert SignalChild(spec.name, signal.SIGHUP) in state.handle(ChildReported(spec.name, READY), 2.0)
        assert SignalChild(spec.name, signal.SIGHUP) not in state.handle(ChildReported(spec.name, READY), 3.0)


def test_without_a_terminal_a_hangup_ends_nothing() -> None:
    """A process that has no terminal, or that ignored SIGHUP when it started, is never ended by one."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert not Hangup().is_terminal_gone


_AT_A_TERMINAL = """
import fcntl, os, signal, sys, termios, time
from actorserve.processes.reload import Hangup
os.setsid()
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
hangup = Hangup()
report = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
signal.signal(signal.SIGHUP, lambda *_: os.write(report, b"gone\\n" if hangup.is_terminal_gone else b"reload\\n"))
os.write(report, b"begun\\n")
time.sleep(30)
time.sleep(30)
"""


def test_a_terminal_that_goes_is_told_from_a_reload(tmp_path: "os.PathLike[str]") -> None:
    """``kill -HUP`` beside a terminal asks for a reload. The SIGHUP that comes because the terminal was closed does
    not.
    """
    ours, theirs = os.openpty()
    report = os.path.join(tmp_path, "report")
    process = subprocess.Popen([sys.executable, "-P", "-c", _AT_A_TERMINAL, report], stdin=theirs)
    os.close(theirs)
    try:
        _wait_for(report, "begun\n")
        process.send_signal(signal.SIGHUP)
        _wait_for(report, "begun\nreload\n")
        os.close(ours)
        _wait_for(report, "begun\nreload\ngone\n")
    finally:
        process.kill()
        process.wait()


def _wait_for(file: str, text: str) -> None:
    deadline = time.monotonic() + 20.0
    found = ""
    while found != text:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
        if os.path.exists(file):
            with open(file) as opened:
                found = opened.read()

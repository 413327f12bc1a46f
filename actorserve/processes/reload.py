"""SIGHUP: a running process reads again what may change while it runs, such as keys. The supervisor passes it on.

A process lists what it can read again (``Reloads.add``). What cannot be read, because a file is damaged or half
written, stays as it was, and one line of the log says why.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from typing import NamedTuple

from actorserve.errors import ActorserveError

logger = logging.getLogger(__name__)


class Reloaded(NamedTuple):
    """The names of what was read again, and of what stayed as it was, because it could not be read."""

    read: list[str]
    failed: list[str]


class Reloads:
    """What this process can read again. Construct it on the main thread."""

    def __init__(self) -> None:
        self._parts: dict[str, Callable[[], None]] = {}
        self._is_missed = False

    def catch_early(self) -> None:
        """Survive a SIGHUP that comes while the process loads, and read again once it ``start``s."""
        signal.signal(signal.SIGHUP, lambda *_: self._miss())

    def start(self) -> None:
        """Handle SIGHUP from now on. Call it on the running event loop, on the main thread."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.run)
        if self._is_missed:
            self._is_missed = False
            self.run()

    def add(self, name: str, read: Callable[[], None]) -> None:
        """Call ``read`` at each SIGHUP. It reads anew what is called ``name``, or changes nothing and raises an
        ActorserveError or an OSError.
        """
        self._parts[name] = read

    def run(self) -> Reloaded:
        """Read everything again."""
        reloaded = Reloaded([], [])
        for name, read in self._parts.items():
            try:
                read()
            except (ActorserveError, OSError) as error:
                reloaded.failed.append(name)
                logger.warning("%s could not be read again, so they stay as they were: %s", name, error)
            else:
                reloaded.read.append(name)
                logger.info("read again: %s", name)
        return reloaded

    def _miss(self) -> None:
        self._is_missed = True


class Hangup:
    """Tells the two meanings of SIGHUP apart: the terminal has gone, or an operator asks for a reload.

    Make it at the start. A process that was started by nohup, or without a terminal, is never ended by a hangup.
    """

    def __init__(self) -> None:
        self._ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()

    @property
    def is_terminal_gone(self) -> bool:
        """Whether the process was started at a terminal, and this terminal no longer exists."""
        return self._ends_with_terminal and not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True

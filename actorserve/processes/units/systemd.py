"""Tells systemd how a process does (sd_notify(3)): one datagram for each piece of news, to ``$NOTIFY_SOCKET``.

``Type=notify`` of a unit makes systemd wait for ``READY=1``. With ``WatchdogSec=`` it kills a process that falls
silent, so the process's event loop says ``WATCHDOG=1`` twice in that time: a loop that is stuck says nothing.
"""

import asyncio
import os
import socket
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from time import monotonic
from typing import Final

from actorserve.processes.status import Phase, Reporter, Status, one_line

_SEND_TIMEOUT_S: Final = 1.0
_SILENCE_S: Final = 600.0
"""A start may go on for this long after a report of its progress; then systemd counts it as failed."""
_END_GRACE_S: Final = 15.0  # for the end of a process once its work is finished
_SAME_AGAIN_S: Final = 1.0  # a download reports its progress thousands of times


class SystemdReporter(Reporter):
    """Reports a process's start, health and end to systemd.

    ``send`` sends one datagram. After ``ready``, the running event loop reports every ``watchdog_s / 2`` that it runs;
    None: systemd does not ask for that.
    """

    def __init__(self, send: Callable[[str], None], watchdog_s: float | None) -> None:
        super().__init__(None)
        self._send_news = send
        self._watchdog_s = watchdog_s
        self._last: tuple[str, float] | None = None  # what was said while loading, and when
        self._next_beat: asyncio.TimerHandle | None = None

    def say(self, text: str) -> None:
        """Show ``text`` as the state of the unit."""
        self._send_news(f"STATUS={one_line(text)}")

    def stopping(self, within_s: float) -> None:
        self._send_news(f"STOPPING=1\nSTATUS=stopping\n{_more_time(within_s + _END_GRACE_S)}")

    def _send(self, status: Status) -> None:
        match status.phase:
            case Phase.LOADING:
                now = monotonic()
                if self._last is None or self._last[0] != status.text or now >= self._last[1] + _SAME_AGAIN_S:
                    self._last = (status.text, now)
                    share = "" if status.progress is None else f", {status.progress:.0%}"
                    self._send_news(f"STATUS={one_line(status.text)}{share}\n{_more_time(_SILENCE_S)}")
            case Phase.READY:
                self._send_news(f"READY=1\nMAINPID={os.getpid()}\nSTATUS={one_line(status.text) or 'ready'}")
                self._begin_to_beat()
            case Phase.FAILED:
                self.say(status.text)
            case Phase.STOPPED:
                self._send_news(f"STOPPING=1\nSTATUS={one_line(status.text)}")
            case Phase.WANTS_WORKER:
                pass  # only a supervisor starts workers for a child, and then the settings ask for one

    def _begin_to_beat(self) -> None:
        if self._watchdog_s is not None and self._next_beat is None:
            self._beat(asyncio.get_running_loop(), self._watchdog_s / 2)

    def _beat(self, loop: asyncio.AbstractEventLoop, every_s: float) -> None:
        self._send_news("WATCHDOG=1")
        self._next_beat = loop.call_later(every_s, self._beat, loop, every_s)


def attach_to_systemd(environment: MutableMapping[str, str] | None = None) -> Reporter:
    """Report to systemd as the environment says; without systemd, to nothing.

    It removes the variables from the environment, because they are not meant for the processes that this one starts.
    """
    environment = os.environ if environment is None else environment
    address = environment.pop("NOTIFY_SOCKET", "")
    watchdog_us, watchdog_pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
    if not address.startswith(("/", "@")):
        return Reporter(None)
    is_watched = watchdog_us.isdecimal() and int(watchdog_us) > 0 and watchdog_pid in ("", str(os.getpid()))
    return SystemdReporter(_sender(address), int(watchdog_us) / 1e6 if is_watched else None)


def _sender(address: str) -> Callable[[str], None]:
    target = address.replace("@", "\0", 1) if address.startswith("@") else address

    def send(news: str) -> None:
        # A process serves on when systemd does not listen.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out, suppress(OSError):
            out.settimeout(_SEND_TIMEOUT_S)
            out.sendto(news.encode(), target)

    return send


def _more_time(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}"

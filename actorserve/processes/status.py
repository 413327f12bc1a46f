"""A child's side of supervision: it reports the progress of its start, and dies with its parent.

The parent (``actors.supervisor``) passes the descriptor of a pipe in ``ACTORSERVE_STATUS_FD`` and its own process id in
``ACTORSERVE_PARENT_PID``. Without them the process does not die with its parent, and reports to nothing but systemd
(``systemd``).
A report is one JSON line, such as ``{"status": "loading", "progress": 0.4, "text": "..."}``. The coordinator also asks
for workers on this pipe (``wants_worker``); the parent answers with a signal when no worker will come.
"""

import contextlib
import ctypes
import json
import os
import signal
from collections.abc import MutableMapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

STATUS_FD = "ACTORSERVE_STATUS_FD"
PARENT_PID = "ACTORSERVE_PARENT_PID"
MAX_TEXT_CHARS = 1000
NO_WORKER = signal.SIGUSR1
"""The parent's signal to a child that has asked for a worker, if none will come."""
EXIT_RESTART = 75
"""The exit status of a process without a parent that is to be started again, as systemd is told to
(``RestartForceExitStatus``).
"""
_PR_SET_PDEATHSIG = 1


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"
    RESTARTS = "restarts"
    WANTS_WORKER = "wants_worker"


@dataclass(frozen=True, slots=True)
class Status:
    """One report. ``progress`` is in 0..1 while loading, or None if the child does not know it."""

    phase: Phase
    text: str = ""
    progress: float | None = None


def one_line(text: str) -> str:
    """``text`` on one line, cut to ``MAX_TEXT_CHARS``, because a failure is shown to a person unchanged."""
    return " ".join(text.split())[:MAX_TEXT_CHARS]


def encode_status(status: Status) -> bytes:
    fields: dict[str, Any] = {"status": status.phase.value, "text": one_line(status.text)}
    if status.progress is not None:
        fields["progress"] = status.progress
    return json.dumps(fields).encode() + b"\n"


def decode_status(line: bytes) -> Status | None:
    """Read one report; None if the line is not a whole report, as when the child was killed while writing."""
    try:
        fields = json.loads(line)
        progress = fields.get("progress")
        return Status(
            phase=Phase(fields["status"]),
            text=one_line(str(fields.get("text", ""))),
            progress=None if progress is None else min(1.0, max(0.0, float(progress))),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


class Reporter:
    """Reports a child's start to its parent. It does nothing if there is no parent, or the parent has ended."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @property
    def is_heard(self) -> bool:
        """Whether a parent reads the reports and shows them to a person."""
        return self._descriptor is not None

    def loading(self, text: str, progress: float | None = None) -> None:
        """Report what the child is doing, and how much of it is done (0..1; None: unknown)."""
        self._send(Status(Phase.LOADING, text, progress))

    def ready(self, text: str = "") -> None:
        """Report that the child is ready for work. The parent restarts a child that dies after this."""
        self._send(Status(Phase.READY, text))

    def failed(self, text: str) -> None:
        """Report in one line why the process fails and ends now."""
        self._send(Status(Phase.FAILED, text))

    def stopped(self, text: str) -> None:
        """Report in one line why the process ends on purpose now. The parent does not restart it."""
        self._send(Status(Phase.STOPPED, text))

    def restarts(self, text: str) -> None:
        """Report in one line why the process ends now. The parent starts it again at once, and counts no failure."""
        self._send(Status(Phase.RESTARTS, text))

    def say(self, text: str) -> None:
        """Show a line about a process that serves. A parent has seen it itself."""

    def stopping(self, within_s: float) -> None:
        """Report that the process was told to end, and may take ``within_s`` to finish its work.

        A parent knows, because it told the process itself.
        """

    def want_worker(self) -> None:
        """Ask for one more worker. The caller must handle the signal ``NO_WORKER``."""
        self._send(Status(Phase.WANTS_WORKER))

    def _send(self, status: Status) -> None:
        if self._descriptor is None:
            return
        # A report is shorter than PIPE_BUF, so the write is atomic. A parent that has ended needs no report.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._descriptor, encode_status(status))


def describe_exit(return_code: int) -> str:
    """How a process ended, in words, from its return code (negative: the signal that killed it)."""
    if return_code >= 0:
        return f"ended with exit status {return_code}"
    try:
        return f"was killed by {signal.Signals(-return_code).name}"
    except ValueError:
        return f"was killed by signal {-return_code}"


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends for any reason.

    If the parent has already ended, this process ends now.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        raise SystemExit(1)


def attach(environment: MutableMapping[str, str] | None = None) -> Reporter:
    """Report to the parent that the environment names, and die with it. Call this first in a child's main.

    It removes both variables from the environment, because the processes that this one starts have another parent.
    """
    environment = os.environ if environment is None else environment
    parent_pid, status_fd = environment.pop(PARENT_PID, None), environment.pop(STATUS_FD, None)
    if parent_pid is not None:
        die_with_parent(int(parent_pid))
    if status_fd is None:
        return Reporter(None)
    descriptor = int(status_fd)
    os.set_inheritable(descriptor, False)  # so that processes that the child starts do not hold the pipe open
    return Reporter(descriptor)

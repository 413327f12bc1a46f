"""A child's side of the supervisor: it reports how its start goes, and dies with its parent.

The parent (``processes.supervisor``) hands over a pipe's number in ``ACTORSERVE_STATUS_FD`` and its own process id in
``ACTORSERVE_PARENT_PID``. Without them, as under systemd, nothing is reported and nobody is followed into death.
A report is one JSON line: ``{"status": "loading", "progress": 0.4, "text": "..."}``, ``ready``, ``failed`` or
``stopped``. The coordinator also asks for workers on this way (``wants_worker``); a signal says that none will come.
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
"""What the parent sends to a child that has asked for a worker, where none will come."""
_PR_SET_PDEATHSIG = 1


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"
    WANTS_WORKER = "wants_worker"


@dataclass(frozen=True, slots=True)
class Status:
    """One report. ``progress`` lies in 0..1 while loading, or is None where the child cannot tell."""

    phase: Phase
    text: str = ""
    progress: float | None = None


def one_line(text: str) -> str:
    """``text`` on one line and not too long, since a failure is shown to a person as it stands."""
    return " ".join(text.split())[:MAX_TEXT_CHARS]


def encode_status(status: Status) -> bytes:
    fields: dict[str, Any] = {"status": status.phase.value, "text": one_line(status.text)}
    if status.progress is not None:
        fields["progress"] = status.progress
    return json.dumps(fields).encode() + b"\n"


def decode_status(line: bytes) -> Status | None:
    """Read one report; None for a line that is none (a child that was killed in mid-line, or writes rubbish)."""
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
    """Reports a child's start to its parent. Does nothing where no parent listens, or once it has gone."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @property
    def is_heard(self) -> bool:
        """Whether a parent shows a person what is reported."""
        return self._descriptor is not None

    def loading(self, text: str, progress: float | None = None) -> None:
        """Tell what is being done, and how much of it is done (0..1, None where unknown)."""
        self._send(Status(Phase.LOADING, text, progress))

    def ready(self, text: str = "") -> None:
        """Tell that work can come. A death from now on is answered by a restart."""
        self._send(Status(Phase.READY, text))

    def failed(self, text: str) -> None:
        """Tell in one line why the process ends now."""
        self._send(Status(Phase.FAILED, text))

    def stopped(self, text: str) -> None:
        """Tell in one line why the process ends now, as it should: it is not started again."""
        self._send(Status(Phase.STOPPED, text))

    def want_worker(self) -> None:
        """Ask for one more worker. Who asks handles ``NO_WORKER``."""
        self._send(Status(Phase.WANTS_WORKER))

    def _send(self, status: Status) -> None:
        if self._descriptor is None:
            return
        # A line is shorter than PIPE_BUF, so it is written whole; a parent that is gone needs no report.
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
    """Have the kernel kill this process when its parent ends, however it ends; end now if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        raise SystemExit(1)


def attach(environment: MutableMapping[str, str] | None = None) -> Reporter:
    """Follow the parent into death and report to it, if the environment names one. Call it first in a child's main.

    Both variables are taken out of the environment: what this process starts has another parent.
    """
    environment = os.environ if environment is None else environment
    parent_pid, status_fd = environment.pop(PARENT_PID, None), environment.pop(STATUS_FD, None)
    if parent_pid is not None:
        die_with_parent(int(parent_pid))
    if status_fd is None:
        return Reporter(None)
    descriptor = int(status_fd)
    os.set_inheritable(descriptor, False)  # a process that the child starts does not hold the pipe open
    return Reporter(descriptor)

"""One process of a child, from its start to its end, as the supervisor sees it."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import Final, NamedTuple

from actorserve.processes.status import PARENT_PID, STATUS_FD, Status, decode_status, describe_exit
from actorserve.processes.supervision import ChildSpec

_REPORT_BYTES: Final = 2**16  # the longest report that is read
_LAST_REPORTS_S: Final = 1.0


class Exit(NamedTuple):
    """How a process ended, in words. ``is_orderly``: it exited with 0, or SIGTERM ended it."""

    how: str
    is_orderly: bool


class ChildProcess:
    """A child process in a group of its own, so that a terminal's Ctrl-C reaches the supervisor alone.

    The child reports on a pipe (``status``). A signal that is sent before the process exists reaches it once it
    does.
    """

    def __init__(self, spec: ChildSpec) -> None:
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None
        self._early_signals: list[signal.Signals] = []

    async def run(self, on_report: Callable[[Status], None]) -> Exit:
        """Start the process, pass on its reports, and return when it has ended."""
        reading, writing = os.pipe()
        try:
            process = await self._start(writing)
        except OSError as error:
            os.close(reading)
            return Exit(f"cannot be run ({error.strerror or error})", False)
        finally:
            os.close(writing)
        reports = asyncio.StreamReader(limit=_REPORT_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reports), os.fdopen(reading, "rb", buffering=0)
        )
        self._process = process
        for number in self._early_signals:
            self._signal(number)
        async with asyncio.TaskGroup() as group:
            listening = group.create_task(_read_reports(reports, on_report))
            return_code = await process.wait()
            # The child's last reports may still be in the pipe. We do not wait for the pipe's end without a limit,
            # because a grandchild that outlives the child may hold the pipe open.
            await asyncio.wait([listening], timeout=_LAST_REPORTS_S)
            listening.cancel()
        transport.close()
        return Exit(describe_exit(return_code), return_code in (0, -signal.SIGTERM))

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; SIGKILL goes to all processes of its group. Nothing happens if it has ended."""
        if self._process is None:
            self._early_signals.append(number)
        else:
            self._signal(number)

    async def _start(self, status_fd: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=[status_fd],
            start_new_session=True,
            env={
                **os.environ,
                **self._spec.environment,
                STATUS_FD: str(status_fd),
                PARENT_PID: str(os.getpid()),
            },
        )

    def _signal(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                if number is signal.SIGKILL:
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)


async def _read_reports(reports: asyncio.StreamReader, on_report: Callable[[Status], None]) -> None:
    while True:
        try:
            line = await reports.readline()
        except ValueError:  # the line is longer than any report
            continue
        if not line:
            return
        report = decode_status(line)
        if report is not None:
            on_report(report)

"""The supervisor: starts the system's processes as children, watches them, restarts them, and ends them in order.

Children are process groups of their own, so that a terminal's Ctrl-C reaches the supervisor alone, which then drains.
A child tells its progress on a pipe (``processes.status``). One that ends before it was ever ready ends everything;
one that ends later is restarted with backoff, and given up when that happens too often (``actors.supervision``). That
goes on while an earlier stage drains, which needs the others to finish what it is doing.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from actorserve.actors.supervision import GiveUp, Restart, RestartLimits, RestartPolicy
from actorserve.errors import ActorserveError
from actorserve.processes.status import PARENT_PID, STATUS_FD, Phase, Status, decode_status

_STOP_GRACE_S = 5.0  # for a process that has nothing to finish
_REPORT_BYTES = 2**16  # the longest report that is read


@dataclass(frozen=True)
class ChildSpec:
    """How to start a child. Stages end one after another: stage 0 is told to drain first, and waited for."""

    name: str
    command: tuple[str, ...]
    stop_stage: int
    environment: Mapping[str, str] = field(default_factory=dict)


class Listener(Protocol):
    """Shows a person what happens. Calls come from the supervisor's event loop and return at once."""

    def progress(self, name: str, report: Status) -> None:
        """A child told how its start goes."""

    def all_ready(self) -> None:
        """Every child has become ready for the first time; work can come. Called once."""

    def restarting(self, name: str, how: str, after_s: float) -> None:
        """A child that was ready has ended unexpectedly, and is started again after that time."""

    def stopping(self, num_children: int) -> None:
        """The children are being told to end. Called once."""


class ChildFailedError(ActorserveError):
    """A child could not be kept running."""


def describe_exit(return_code: int) -> str:
    """How a process ended, in words, from its return code (negative: the signal that killed it)."""
    if return_code >= 0:
        return f"ended with exit status {return_code}"
    try:
        return f"was killed by {signal.Signals(-return_code).name}"
    except ValueError:
        return f"was killed by signal {-return_code}"


class _Child:
    """One child over all of its lives."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.was_ready = False
        self.failure = ""  # what the present life said about why it ends
        self.process: asyncio.subprocess.Process | None = None
        self.told_to_end = asyncio.Event()  # it is not restarted any more
        self.ended = asyncio.Event()  # for good: no further life follows

    async def start(self) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.ReadTransport]:
        """Start a life. Returns it, the stream of its reports, and that stream's transport, which is to be closed.

        Raises: OSError, when the program cannot be run.
        """
        self.failure = ""
        reading, writing = os.pipe()
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[writing],
                start_new_session=True,
                env={
                    **os.environ,
                    **self.spec.environment,
                    STATUS_FD: str(writing),
                    PARENT_PID: str(os.getpid()),
                },
            )
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        reader = asyncio.StreamReader(limit=_REPORT_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", buffering=0)
        )
        return self.process, reader, transport

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the present life, if there is one."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def kill(self) -> None:
        """End the present life at once, with all that it has started."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Supervisor:
    """Keeps children running until it is told to stop.

    ``limits`` bound the restarts of each child. ``drain_timeout_s`` is for the first stage, which finishes what it is
    doing. All of it runs on one event loop.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        limits: RestartLimits,
        listener: Listener,
        drain_timeout_s: float,
    ) -> None:
        self._children = [_Child(spec) for spec in specs]
        self._limits = limits
        self._listener = listener
        self._drain_timeout_s = drain_timeout_s
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._failure: str | None = None

    def stop(self) -> None:
        """Drain and end. Called again: end at once."""
        if self._stopping.is_set():
            self._killing.set()
            for child in self._children:
                child.told_to_end.set()
        self._stopping.set()

    @property
    def was_killed(self) -> bool:
        """Whether the children were ended without waiting for what they were doing."""
        return self._killing.is_set()

    async def run(self) -> None:
        """Start the children, and return when they have all ended because ``stop`` was called.

        Raises: ChildFailedError, when all have ended and one could not be kept running, or has not finished its drain.
        """
        async with asyncio.TaskGroup() as group:
            for child in self._children:
                group.create_task(self._keep_running(child))
            group.create_task(self._end_in_order())
        if self._failure is not None:
            raise ChildFailedError(self._failure)

    async def _keep_running(self, child: _Child) -> None:
        policy = RestartPolicy(self._limits)
        loop = asyncio.get_running_loop()
        try:
            while not child.told_to_end.is_set():
                how, ended_well = await self._live(child)
                told_to_end = child.told_to_end.is_set()
                if told_to_end and (ended_well or child.spec.stop_stage > 0 or self._killing.is_set()):
                    return
                if not child.was_ready:
                    self._fail(f"{child.spec.name} could not start: {child.failure or f'it {how}'}")
                    return
                if told_to_end:
                    self._fail(f"{child.spec.name}: {child.failure or f'it {how} before it had finished'}")
                    return
                how = f"failed: {child.failure}" if child.failure else how
                match policy.failed(loop.time()):
                    case GiveUp(num_failures=times):
                        self._fail(f"{child.spec.name} {how}; that was failure {times} in {self._limits.window_s:g} s")
                        return
                    case Restart(after_s=after_s):
                        self._listener.restarting(child.spec.name, how, after_s)
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(child.told_to_end.wait(), after_s)
        finally:
            child.ended.set()

    async def _live(self, child: _Child) -> tuple[str, bool]:
        """Run one life of a child to its end. Returns how it ended, in words, and whether that is what SIGTERM does."""
        try:
            process, reports, transport = await child.start()
        except OSError as error:
            return f"cannot be run ({error.strerror or error})", False
        if child.told_to_end.is_set():  # while the process was being made: nobody has signalled it
            child.send_signal(signal.SIGTERM)
        if self._killing.is_set():
            child.kill()
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._read_reports(child, reports))
            return_code = await process.wait()
            # What the child said last is still in the pipe. Its end comes with the last process that holds it, so
            # a grandchild that outlives the child must not keep us.
            await asyncio.wait([reading], timeout=1.0)
            reading.cancel()
        transport.close()
        return describe_exit(return_code), return_code in (0, -signal.SIGTERM)

    async def _read_reports(self, child: _Child, reports: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await reports.readline()
            except ValueError:  # longer than any report
                continue
            if not line:
                return
            report = decode_status(line)
            if report is None:
                continue
            if report.phase is Phase.FAILED:
                child.failure = report.text
            first = report.phase is Phase.READY and not child.was_ready
            child.was_ready = child.was_ready or first
            self._listener.progress(child.spec.name, report)
            if first and all(each.was_ready for each in self._children) and not self._stopping.is_set():
                self._listener.all_ready()

    def _fail(self, why: str) -> None:
        if self._failure is None:
            self._failure = why
        self._stopping.set()

    async def _end_in_order(self) -> None:
        """When told to stop: end stage after stage, each with SIGTERM, and with SIGKILL what has not gone in time."""
        await self._stopping.wait()
        self._listener.stopping(sum(not child.ended.is_set() for child in self._children))
        for stage in sorted({child.spec.stop_stage for child in self._children}):
            children = [child for child in self._children if child.spec.stop_stage == stage]
            for child in children:
                child.told_to_end.set()
                child.send_signal(signal.SIGTERM)
            patience_s = _STOP_GRACE_S + (self._drain_timeout_s if stage == 0 else 0.0)
            await self._wait_for_end(children, patience_s)
            for child in children:
                child.kill()
            for child in children:
                await child.ended.wait()

    async def _wait_for_end(self, children: Sequence[_Child], patience_s: float) -> None:
        """Return when all of them have ended, when time is up, or when everything is to end at once."""

        async def all_ended() -> None:
            for child in children:
                await child.ended.wait()

        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(all_ended()), group.create_task(self._wait_for_kill())]
            await asyncio.wait(waiting, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()

    async def _wait_for_kill(self) -> None:
        await self._killing.wait()


def listen_to_signals(supervisor: Supervisor) -> None:
    """Stop on Ctrl-C, on SIGTERM, and when the terminal goes."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.stop)

"""The supervisor: starts the system's processes as children, watches them, restarts them, and ends them in order.

Children are process groups of their own, so that a terminal's Ctrl-C reaches the supervisor alone, which then drains.
A child tells its progress on a pipe (``processes.status``). One that ends before it was ever ready ends everything;
one that ends later is restarted with backoff, and given up when that happens too often (``processes.restarts``). That
goes on while an earlier stage drains, which needs the others to finish what it is doing.

Beside those that run from the start there may be spare ones, of which one is started each time that a child asks for a
worker; where none is left, or it cannot start, who asked is told. Whatever befalls it ends nothing else. A child that
says that it stopped on purpose becomes a spare one.
"""

import asyncio
import contextlib
import os
import signal
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from actorserve.errors import ActorserveError
from actorserve.processes.restarts import GiveUp, Restart, RestartLimits, RestartPolicy
from actorserve.processes.status import NO_WORKER, PARENT_PID, STATUS_FD, Phase, Status, decode_status, describe_exit

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

    def adding(self, name: str) -> None:
        """A spare child is started, for there is work for it."""

    def removed(self, name: str, why: str) -> None:
        """A child has ended for good, and the others go on: it has stopped, or was a spare one and failed."""

    def stopping(self, num_children: int) -> None:
        """The children are being told to end. Called once."""


class ChildFailedError(ActorserveError):
    """A child could not be kept running."""


class _Child:
    """One child over all of its lives."""

    def __init__(self, spec: ChildSpec, tell_failure: Callable[[], None] | None = None) -> None:
        """``tell_failure``: only of a spare one; tells whoever asked for it that it could not start."""
        self.spec = spec
        self.tell_failure = tell_failure
        self.was_ready = False
        self.stopped_because = ""  # what the present life said when it stopped on purpose
        self.failure = ""  # what the present life said about why it ends
        self.process: asyncio.subprocess.Process | None = None
        self.told_to_end = asyncio.Event()  # it is not restarted any more
        self.ended = asyncio.Event()  # for good: no further life follows

    @property
    def was_spare(self) -> bool:
        return self.tell_failure is not None

    async def start(self) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.ReadTransport]:
        """Start a life. Returns it, the stream of its reports, and that stream's transport, which is to be closed.

        Raises: OSError, when the program cannot be run.
        """
        self.failure = self.stopped_because = ""
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
    doing. The first of the ``spare`` children that does not run is started when a child asks for a worker. All of it
    runs on one event loop.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        limits: RestartLimits,
        listener: Listener,
        drain_timeout_s: float,
        spare: Sequence[ChildSpec] = (),
    ) -> None:
        self._children = [_Child(spec) for spec in specs]
        self._order = {spec.name: number for number, spec in enumerate((*specs, *spare))}
        self._spare = list(spare)
        self._group = asyncio.TaskGroup()
        self._said_ready = False
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
        async with self._group:
            for child in self._children:
                self._group.create_task(self._keep_running(child))
            self._group.create_task(self._end_in_order())
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
                if ended_well and child.stopped_because:
                    self._remove(child, f"{child.spec.name} has stopped: {child.stopped_because}")
                    return
                if not child.was_ready:
                    self._lose(child, f"{child.spec.name} could not start: {child.failure or f'it {how}'}")
                    return
                if told_to_end:
                    self._fail(f"{child.spec.name}: {child.failure or f'it {how} before it had finished'}")
                    return
                how = f"failed: {child.failure}" if child.failure else how
                match policy.failed(loop.time()):
                    case GiveUp(num_failures=times):
                        window_s = self._limits.window_s
                        self._lose(child, f"{child.spec.name} {how}; that was failure {times} in {window_s:g} s")
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
            match report.phase:
                case Phase.FAILED:
                    child.failure = report.text
                case Phase.STOPPED:
                    child.stopped_because = report.text or "it was told to"
                case Phase.READY:
                    child.was_ready = True
                case Phase.WANTS_WORKER:
                    self._add_spare(child)
                    continue
            self._listener.progress(child.spec.name, report)
            all_ready = all(each.was_ready or each.was_spare for each in self._children)
            if all_ready and not self._said_ready and not self._stopping.is_set():
                self._said_ready = True
                self._listener.all_ready()

    def _add_spare(self, asker: _Child) -> None:
        its_life = asker.process

        def tell_failure() -> None:
            # A later life has not asked, and may not know the signal yet; one that ends may know it no more.
            if asker.process is its_life and not self._stopping.is_set():
                asker.send_signal(NO_WORKER)

        if not self._spare or self._stopping.is_set():
            tell_failure()
            return
        child = _Child(self._spare.pop(0), tell_failure)
        self._children.append(child)
        self._listener.adding(child.spec.name)
        self._group.create_task(self._keep_running(child))

    def _remove(self, child: _Child, why: str) -> None:
        self._children.remove(child)
        insort(self._spare, child.spec, key=lambda spec: self._order[spec.name])
        self._listener.removed(child.spec.name, why)

    def _lose(self, child: _Child, why: str) -> None:
        if child.tell_failure is not None:
            self._remove(child, why)
            if not child.was_ready:
                child.tell_failure()
        else:
            self._fail(why)

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

"""Starts workers while the system runs: as children of the supervisor, as systemd units, or by a command.

The coordinator's core decides when, and gives a new worker its role by a message. It stops workers by a message
(Drain), so nothing here stops them. A new worker says Hello to the coordinator once it is ready. A worker may also fail
before that without a report, so the core waits for a limited time.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from actorserve.core.messages import InstanceRole, StartFailed
from actorserve.errors import ActorserveError
from actorserve.processes.status import Reporter, describe_exit
from actorserve.settings import ScalingSettings

ACTION = "ACTORSERVE_ACTION"
ROLE = "ACTORSERVE_ROLE"
TIMEOUT_S = 30.0  # for the program that starts a worker; the worker itself is ready later
_FREE_STATES = ("inactive", "failed")
_log = logging.getLogger("actorserve.scaler")


class ScalerError(ActorserveError):
    """No worker was started, and none will come."""


class Scaler(Protocol):
    """Starts one more worker. It returns without waiting until the worker is ready."""

    async def start_worker(self, role: InstanceRole | None) -> None:
        """``role``: what the coordinator will have it compute; None: what its settings say.

        Raises: ScalerError when no worker will come.
        """
        ...


class ChildScaler:
    """Starts workers as children of this process's supervisor, which takes the first spare child."""

    def __init__(self, supervisor: Reporter) -> None:
        self._supervisor = supervisor

    async def start_worker(self, role: InstanceRole | None) -> None:
        if not self._supervisor.is_heard:
            raise ScalerError('scaling.start_with is "processes", and this coordinator runs under no supervisor')
        self._supervisor.want_worker()


class UnitScaler:
    """Starts workers as systemd units. ``unit`` is their name with {number} in it, for 0, 1, ...

    It starts the first unit that neither runs nor is about to run.
    """

    def __init__(self, unit: str, max_workers: int, timeout_s: float = TIMEOUT_S) -> None:
        self._units = [unit.replace("{number}", str(number)) for number in range(max_workers)]
        self._timeout_s = timeout_s

    async def start_worker(self, role: InstanceRole | None) -> None:
        properties = "--property=Id,ActiveState,Job"  # Job is shown while a job of the unit is queued
        show = ["systemctl", "show", properties, *self._units]
        shown = await _run(show, self._timeout_s, stdout=asyncio.subprocess.PIPE)
        facts = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in shown.split("\n\n")]
        free = {unit.get("Id") for unit in facts if unit.get("ActiveState") in _FREE_STATES and not unit.get("Job")}
        unit = next((unit for unit in self._units if unit in free), None)
        if unit is None:
            raise ScalerError(f"all {len(self._units)} units run or are about to run")
        await _run(["systemctl", "start", "--no-block", unit], self._timeout_s)


class CommandScaler:
    """Starts workers with ``command``, which runs without a shell. Exit status 0 means that a worker was started. The
    command learns the worker's role, because its host may depend on it.
    """

    def __init__(self, command: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
        self._command = command
        self._timeout_s = timeout_s

    async def start_worker(self, role: InstanceRole | None) -> None:
        environment = {ACTION: "start"} if role is None else {ACTION: "start", ROLE: role.value}
        await _run(self._command, self._timeout_s, environment=environment)


def make_scaler(settings: ScalingSettings, supervisor: Reporter) -> Scaler | None:
    """The scaler that the settings name; None when the number of workers is fixed."""
    if settings.max_workers is None:
        return None
    match settings.start_with:
        case "processes":
            return ChildScaler(supervisor)
        case "systemd":
            return UnitScaler(settings.unit, settings.max_workers)
        case "command":
            return CommandScaler(settings.command_words)


class Starts:
    """Starts workers one after another. A failure is logged in one line, and reported to ``tell`` as a StartFailed."""

    def __init__(self, scaler: Scaler, tell: Callable[[StartFailed], None]) -> None:
        self._scaler = scaler
        self._tell = tell
        self._wanted: asyncio.Queue[InstanceRole | None] = asyncio.Queue()

    def start_worker(self, role: InstanceRole | None) -> None:
        """Queue the start of one more worker, and return at once. The core bounds the number of starts."""
        self._wanted.put_nowait(role)

    async def run(self) -> None:
        """Start the queued workers, until cancelled."""
        while True:
            role = await self._wanted.get()
            try:
                await self._scaler.start_worker(role)
            except ScalerError as error:
                _log.warning("no worker was started: %s", error)
                self._tell(StartFailed())


async def _run(
    command: Sequence[str],
    timeout_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    stdout: int = asyncio.subprocess.DEVNULL,
) -> str:
    """Run a program to its end, without waiting for processes that it leaves running. Returns its stdout.

    The program writes to our stderr.

    Raises: ScalerError when the program cannot be run, takes too long (then it is killed), or fails.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    except OSError as error:
        raise ScalerError(f"cannot run {command[0]} ({error.strerror or error})") from None
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
            return_code = await process.wait()
    except TimeoutError:
        raise ScalerError(f"{command[0]} has not ended in {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if return_code != 0:
        raise ScalerError(f"{command[0]} {describe_exit(return_code)}")
    return (output or b"").decode(errors="replace")

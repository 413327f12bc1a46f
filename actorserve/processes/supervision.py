"""What supervision is about: the children of one host, what the supervisor's core is told, and what it asks for."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from actorserve.core.messages import Tick
from actorserve.processes.restarts import RestartLimits
from actorserve.processes.status import Status


@dataclass(frozen=True)
class ChildSpec:
    """How to start a child. At the end the stages drain one after another, beginning with stage 0."""

    name: str
    command: tuple[str, ...]
    stop_stage: int
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SupervisionTree:
    """The children of one supervisor. Each is restarted alone when it fails (OTP's ``one_for_one``), within ``limits``.

    ``children`` run from the start (OTP: permanent). A child that cannot be kept running ends all of them.
    ``spare`` children are started in order, one each time that a child asks for a worker. A spare child that cannot be
    kept running ends nothing else. ``drain_timeout_s`` is for stage 0, which finishes the work in flight.
    """

    children: tuple[ChildSpec, ...]
    spare: tuple[ChildSpec, ...] = ()
    limits: RestartLimits = field(default_factory=RestartLimits)
    drain_timeout_s: float = 0.0


# --- what the core is told -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChildReported:
    """The running process of a child has sent a report."""

    name: str
    report: Status


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """A child's process has ended, or could not be started. ``how`` says so in words.

    ``ended_well``: it ended as a process does that SIGTERM asks to end.
    """

    name: str
    how: str
    ended_well: bool


@dataclass(frozen=True, slots=True)
class ShutDown:
    """Drain the children and end. Told again: end at once."""


SupervisorEvent = ChildReported | ChildEnded | ShutDown | Tick


# --- what the core asks for ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartChild:
    """Start a process; answered by any number of ChildReported, then one ChildEnded."""

    spec: ChildSpec


@dataclass(frozen=True, slots=True)
class SignalChild:
    """Send a signal to the child's running process."""

    name: str
    number: signal.Signals


@dataclass(frozen=True, slots=True)
class KillChild:
    """Kill the child's process at once, with all processes that it has started."""

    name: str


@dataclass(frozen=True, slots=True)
class AllEnded:
    """Every child has ended for good. ``failure``: why one could not be kept running, or did not finish its drain."""

    failure: str | None


# --- what a person is told -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """A child has reported how its start goes."""

    name: str
    report: Status


@dataclass(frozen=True, slots=True)
class AllReady:
    """Every child that runs from the start has become ready for the first time; work can come. Once."""


@dataclass(frozen=True, slots=True)
class Restarting:
    """A child that was ready has ended unexpectedly, and is started again in ``after_s``."""

    name: str
    how: str
    after_s: float


@dataclass(frozen=True, slots=True)
class Adding:
    """A spare child is started, because a worker was asked for."""

    name: str


@dataclass(frozen=True, slots=True)
class Removed:
    """A child has ended for good and the others go on: it has stopped on purpose, or it was a spare one and failed."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Stopping:
    """The children are being told to end; ``num_children`` of them have not ended yet. Once."""

    num_children: int


News = Progress | AllReady | Restarting | Adding | Removed | Stopping
SupervisorEffect = StartChild | SignalChild | KillChild | AllEnded | News

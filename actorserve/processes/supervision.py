"""The children of one host, and the events and effects of the supervisor's core."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from actorserve.core.messages import Tick
from actorserve.processes.restarts import RestartLimits
from actorserve.processes.status import Status


@dataclass(frozen=True)
class ChildSpec:
    """How to start a child. When the server ends, stage 0 ends first, and then the later stages."""

    name: str
    command: tuple[str, ...]
    stop_stage: int
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SupervisionTree:
    """The children of one supervisor. A child that fails is restarted alone (OTP's ``one_for_one``), within ``limits``.

    ``children`` run from the start (OTP: permanent). A child that cannot be kept running ends all of them.
    When a child asks for a worker, the next of the ``spare`` children is started. A spare child that cannot be kept
    running does not end the others. ``drain_timeout_s`` is for stage 0, and for each of the first
    ``num_draining_stages``, which finish the work in flight.
    """

    children: tuple[ChildSpec, ...]
    spare: tuple[ChildSpec, ...] = ()
    limits: RestartLimits = field(default_factory=RestartLimits)
    drain_timeout_s: float = 0.0
    num_draining_stages: int = 1


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChildReported:
    """A child's process has sent a report."""

    name: str
    report: Status


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """A child's process has ended, or could not be started. ``how`` says so in words.

    ``ended_well``: it exited with 0, or SIGTERM ended it.
    """

    name: str
    how: str
    ended_well: bool


@dataclass(frozen=True, slots=True)
class ShutDown:
    """Drain the children and end. A second ShutDown ends them at once."""


@dataclass(frozen=True, slots=True)
class Reload:
    """Have the children read again what may change while they run (``processes.reload``)."""


SupervisorEvent = ChildReported | ChildEnded | ShutDown | Reload | Tick


# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartChild:
    """Start a child's process. Any number of ChildReported follow, and then one ChildEnded."""

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


# --- effects that inform a person ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """A child has sent a report about its start."""

    name: str
    report: Status


@dataclass(frozen=True, slots=True)
class AllReady:
    """Every child that runs from the start has become ready, so the server can work. It comes once."""


@dataclass(frozen=True, slots=True)
class Restarting:
    """A child that was ready has ended unexpectedly, and will be started again after ``after_s``."""

    name: str
    how: str
    after_s: float


@dataclass(frozen=True, slots=True)
class Adding:
    """A spare child is started, because a child has asked for a worker."""

    name: str


@dataclass(frozen=True, slots=True)
class Removed:
    """A child has ended for good and the others go on: it stopped on purpose, or it was a spare child and failed."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Stopping:
    """The children are being told to end; ``num_children`` of them still run or wait for a restart. It comes once."""

    num_children: int


News = Progress | AllReady | Restarting | Adding | Removed | Stopping
SupervisorEffect = StartChild | SignalChild | KillChild | AllEnded | News

"""Messages: power caps, and what a host's actuator reads back. Watts of a device are its power limit's."""

from actorserve.core.messages.value import value


@value
class DevicePower:
    """One device, as its driver tells. None: the driver does not tell; a number is never made up.

    - ``device`` is the driver's name of it, a GPU's UUID.
    - Its power limit may be from ``least_watts`` to ``most_watts``, and is ``usual_watts`` if nothing else sets it.
      ``most_watts`` is no more than what was set when no cap was, because that may be what its cables carry.
    - ``cap_watts`` is the power limit that was set last, read back, and ``enforced_watts`` the one that the device
      keeps to, which may be lower.
    - ``draw_watts`` is its power now.
    - ``is_throttled``: heat slows it down. ``can_set``: its power limit can be changed.
    """

    device: str
    least_watts: float
    most_watts: float
    usual_watts: float
    cap_watts: float | None
    enforced_watts: float | None
    draw_watts: float | None
    is_throttled: bool
    can_set: bool


@value
class PowerReading:
    """Local, to a worker's core, which puts it into its load reports: the power of what the worker computes on.

    - ``device`` is the driver's name of the GPU; empty for CPUs. The power and energy of CPUs are the part of the
      host's CPU packages that this process's CPU time took, so that several workers of a host count the packages once.
      Those of a GPU are divided evenly among the processes that compute on it.
    - ``draw_watts`` is the power now, ``cap_watts`` the power limit, and ``energy_j`` the energy since the worker
      started.
    - ``temperature_c``, ``clock_mhz`` and the free memory are the GPU's. ``is_throttled``: heat slows it down.
    """

    device: str = ""
    draw_watts: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    clock_mhz: float | None = None
    memory_free_bytes: int | None = None
    is_throttled: bool = False
    cap_watts: float | None = None


@value
class PowerReport:
    """p -> c: the host's devices, read after the SetPowerCaps of this number was carried out (0: none was yet).

    ``feed_watts`` is the measured power of everything on the host's feed; None if nothing measures it.
    """

    sequence: int
    devices: tuple[DevicePower, ...]
    feed_watts: float | None = None


@value
class PowerRead:
    """Local, to an actuator: its devices were read. ``feed_watts`` as in PowerReport."""

    devices: tuple[DevicePower, ...]
    feed_watts: float | None = None


@value
class SetPowerCaps:
    """c -> p: set these power limits, as parallel columns; other devices keep theirs. A later number replaces this one.

    ``budget_watts`` is the host's budget, for the time without a coordinator; None: there is none.
    """

    sequence: int
    devices: tuple[str, ...]
    caps_watts: tuple[float, ...]
    budget_watts: float | None = None

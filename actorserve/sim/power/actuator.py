"""A simulated actuator of power caps, for all machines of a cluster. A machine is a device with its worker's name."""

from collections.abc import Iterable
from typing import Final

from actorserve.core.messages import DevicePower, Peer, PowerReport
from actorserve.sim.power.machine_power import MachinePower

ACTUATOR: Final = Peer("power-0", 1)
REPORT_S: Final = 0.25
"""Time between two readings, as of the real actuator."""


def power_report(sequence: int, machines: Iterable[tuple[str, MachinePower]], least_cap: float) -> PowerReport:
    """What the actuator reads of the machines after the SetPowerCaps of this number."""
    return PowerReport(sequence, tuple([_device(name, power, least_cap) for name, power in machines]))


def _device(name: str, power: MachinePower, least_cap: float) -> DevicePower:
    full_watts, cap_watts = power.full_watts, power.cap * power.full_watts
    return DevicePower(
        device=name,
        least_watts=least_cap * full_watts,
        most_watts=full_watts,
        usual_watts=full_watts,
        cap_watts=cap_watts,
        enforced_watts=cap_watts,
        draw_watts=None,
        is_throttled=False,
        can_set=True,
    )

"""A host's watts without a coordinator: shared evenly among its devices, because nothing tells what they do.

Caps fall first. A cap rises only by watts that are free: those that no device may take, by the cap that was read and by
the one that was set. A device that keeps a higher cap than the one that was set counts at the cap that it has, and the
others make up for it.
"""

from collections.abc import Collection, Mapping, Sequence
from math import floor

from actorserve.core.messages import DevicePower
from actorserve.core.power.caps import SAME_WATTS, Staircase, cap_watts, full_watts, meet_budgets


def share_evenly(
    devices: Sequence[DevicePower], caps: Mapping[str, float], stuck: Collection[str], watts: float
) -> dict[str, float]:
    """The caps to set now, until the next reading, so that the devices come to share ``watts`` evenly.

    ``caps`` are those that were set before. The ``stuck`` devices do not come down to them.
    """
    bounds = {power.device: max(cap_watts(power), caps.get(power.device, 0.0)) for power in devices}
    free = [power for power in devices if power.can_set and power.cap_watts is not None and power.device not in stuck]
    fixed = [watts for device, watts in bounds.items() if device not in {power.device for power in free}]
    ways = [_way(power) for power in free] + [Staircase("", None, watts, watts, watts) for watts in fixed]
    parts = {
        power.device: max(power.least_watts, float(floor(part)))  # caps are whole watts
        for power, part in zip(free, meet_budgets(ways, {"": watts}, None), strict=False)
    }
    falls = {
        device: part
        for device, part in parts.items()
        if bounds[device] > part + SAME_WATTS and caps.get(device) != part
    }
    if falls:
        return falls
    free_watts = watts - sum(bounds.values())
    rises: dict[str, float] = {}
    for device, part in sorted(parts.items()):
        cap = min(part, float(floor(bounds[device] + max(0.0, free_watts))))
        if cap > bounds[device] + SAME_WATTS:
            rises[device] = cap
            free_watts -= cap - bounds[device]
    return rises


def _way(power: DevicePower) -> Staircase:
    """All devices with a way go down together, by the same part of it."""
    return Staircase("", None, full_watts(power), power.least_watts, power.least_watts)

"""The caps that meet the budgets: which devices are lowered first, and how far (Splitwise's HHcap, made to a rule).

Splitwise caps all machines of its token pool at half of their power, because decoding hardly notices. Here the caps
follow from the budgets. All devices descend one staircase, and a budget asks for a place on it, as high as possible:

1. devices without an instance, to their least power;
2. those of token instances, to the knee: the lowest cap under which tokens still come as fast as they must;
3. those of mixed instances, to the same knee;
4. those of prompt instances, to that knee as well;
5. all of them, evenly, to their least power.

Within a stage the devices go down together, by the same part of the stage's way. A host's devices stand at least as low
as its own budget asks, and all hosts at least as low as the cluster's. So watts that token instances free go to prompt
instances, and where no budget presses, every device has its full power.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from actorserve.core.messages import InstanceRole

NUM_STAGES: Final = 5
_STAGE_OF: Final = {None: 1, InstanceRole.TOKEN: 2, InstanceRole.MIXED: 3, InstanceRole.PROMPT: 4}


@dataclass(frozen=True, slots=True)
class Staircase:
    """A device's way down: ``top_watts`` until the stage of its ``role`` (None: no instance), in that stage to
    ``knee_watts``, and in the last one to ``least_watts``. A device whose cap cannot be set stays at one height.
    """

    host: str
    role: InstanceRole | None
    top_watts: float
    knee_watts: float
    least_watts: float

    def watts(self, depth: float) -> float:
        """The cap at a depth from 0 to ``NUM_STAGES``. It is linear within a stage, and never grows with the depth."""
        stage = _STAGE_OF[self.role]
        down = min(1.0, max(0.0, depth - (stage - 1)))
        floor = min(1.0, max(0.0, depth - (NUM_STAGES - 1)))
        end = self.least_watts if self.role is None else min(self.top_watts, max(self.knee_watts, self.least_watts))
        return self.top_watts - down * (self.top_watts - end) - floor * (end - self.least_watts)


def meet_budgets(devices: Sequence[Staircase], of_host: Mapping[str, float], of_all: float | None) -> list[float]:
    """A cap for each device, in watts. The devices of each host together, and all together, meet their budgets where
    that is possible; else they have their least power.
    """
    depths: dict[str, float] = {}
    for host in sorted({device.host for device in devices}):
        there = [device for device in devices if device.host == host]
        depths[host] = _depth(there, {}, of_host[host]) if host in of_host else 0.0
    if of_all is not None:
        common = _depth(devices, depths, of_all)
        depths = {host: max(common, depth) for host, depth in depths.items()}
    return [device.watts(depths[device.host]) for device in devices]


def _depth(devices: Sequence[Staircase], depths: Mapping[str, float], budget_watts: float) -> float:
    """The least depth at which the devices meet the budget, where each host is at least at its own of ``depths``."""
    corners = sorted({*map(float, range(NUM_STAGES + 1)), *depths.values()})
    # The sum is linear between two corners, so the depth follows from the two around the budget.
    low, high = 0, len(corners) - 1
    if _sum_watts(devices, depths, corners[low]) <= budget_watts:
        return 0.0
    if _sum_watts(devices, depths, corners[high]) >= budget_watts:
        return float(NUM_STAGES)
    while high - low > 1:
        middle = (low + high) // 2
        if _sum_watts(devices, depths, corners[middle]) > budget_watts:
            low = middle
        else:
            high = middle
    above, below = _sum_watts(devices, depths, corners[low]), _sum_watts(devices, depths, corners[high])
    return corners[low] + (corners[high] - corners[low]) * (above - budget_watts) / (above - below)


def _sum_watts(devices: Sequence[Staircase], depths: Mapping[str, float], depth: float) -> float:
    return sum([device.watts(max(depth, depths.get(device.host, 0.0))) for device in devices])

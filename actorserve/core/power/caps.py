"""The caps that meet the budgets: which devices are lowered first, and how far (Splitwise's HHcap, made to a rule).

Splitwise caps all machines of its token pool at half of their power, because decoding hardly notices. Here the caps
follow from the budgets. All devices descend one staircase, and a budget asks for a place on it, as high as possible:

1. devices without an instance, to their least power;
2. those of token instances, to the knee: the lowest cap under which tokens still come as fast as they must;
3. those of mixed instances, to the same knee;
4. those of prompt instances, to a knee as well: the lowest cap under which prompts take only a little longer;
5. all of them to their least power, so that both phases take the same number of times as long as at their knees.

Prompts go first in the last two stages, because tokens at their knee are at the limit that users were promised. They go
only a little further, because a pool that is slowed much more than the other one holds up all requests, and watts of
the pool that waits for it are wasted. A prompt's time grows less than a token's where both have the same cap below the
knee, so equal caps would waste some.

Within a stage the devices go down together, by the same part of the stage's way. A host's devices stand at least as low
as its own budget asks, and all hosts at least as low as the cluster's. So watts that token instances free go to prompt
instances, and where no budget presses, every device has its full power.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from actorserve.core.messages import DevicePower, InstanceRole

SAME_WATTS: Final = 0.5  # caps that are read back may be rounded
NUM_STAGES: Final = 5
NUM_STEPS: Final = 10  # of the last stage, between which the caps are linear
_LAST_STAGE: Final = tuple([NUM_STAGES - 1 + number / NUM_STEPS for number in range(1, NUM_STEPS + 1)])
_STAGE_OF: Final = {None: 1, InstanceRole.TOKEN: 2, InstanceRole.MIXED: 3, InstanceRole.PROMPT: 4}


def cap_watts(power: DevicePower) -> float:
    """The cap that was read. A device that does not tell its cap may take its usual power."""
    return power.usual_watts if power.cap_watts is None else power.cap_watts


def full_watts(power: DevicePower) -> float:
    """The usual power, within what the device's driver allows."""
    return min(power.most_watts, max(power.least_watts, power.usual_watts))


@dataclass(frozen=True, slots=True)
class Staircase:
    """A device's way down: ``top_watts`` until the stage of its ``role`` (None: no instance), in that stage to
    ``knee_watts``, and in the last one over ``slower_watts`` (one for each step but the last) to ``least_watts``. A
    device whose cap cannot be set stays at one height.
    """

    host: str
    role: InstanceRole | None
    top_watts: float
    knee_watts: float
    least_watts: float
    slower_watts: tuple[float, ...] = ()

    def watts(self, depth: float) -> float:
        """The cap at a depth from 0 to ``NUM_STAGES``. It is linear within a stage, in the last one within a step, and
        never grows with the depth.
        """
        stage = _STAGE_OF[self.role]
        end = self.least_watts if self.role is None else min(self.top_watts, max(self.knee_watts, self.least_watts))
        if depth <= NUM_STAGES - 1:
            down = min(1.0, max(0.0, depth - (stage - 1)))
            return self.top_watts - down * (self.top_watts - end)
        steps = min(1.0, depth - (NUM_STAGES - 1)) * NUM_STEPS
        number = min(NUM_STEPS - 1, int(steps))
        above, below = self._corner(number, end), self._corner(number + 1, end)
        return above - (steps - number) * (above - below)

    def _corner(self, number: int, end: float) -> float:
        """The cap after so many steps of the last stage, which begins at ``end``."""
        if number == 0:
            return end
        if number > len(self.slower_watts):
            return self.least_watts
        return min(end, max(self.least_watts, self.slower_watts[number - 1]))


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
    corners = sorted({*map(float, range(NUM_STAGES)), *_LAST_STAGE, *depths.values()})
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

"""Eight GPUs in virtual time whose power follows their load and their caps, with lag and noise.

The bounds of a power limit are those that ``nvidia-smi -q`` prints for these GPUs (H100 SXM: as quoted in
stackhpc/ansible-slurm-appliance#975; A100 SXM: NVIDIA/nvidia-docker#1648).

A GPU's power moves towards what its work asks for, or towards its cap if that is lower, with a time constant. It
passes that by noise, and by a constant part if a run says so. A driver's reading is older and has its own noise.
"""

import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from actorserve.core.messages import DevicePower, InstanceRole, PowerRead
from actorserve.core.power.curves import CURVES

FULL_WATTS: Final = {"h100": 700.0, "a100": 400.0}
LEAST_WATTS: Final = {"h100": 200.0, "a100": 100.0}
STEP_S: Final = 0.005
_IDLE: Final = 0.12  # of full power; assumed
_LAG_S: Final = 0.05  # of the power after the load or the cap; assumed
_READING_AGE_S: Final = 0.1  # assumed
_NOISE: Final = 0.01  # standard deviation, of the power and of a reading; assumed


@dataclass
class FakeGpu:
    """One GPU of a ``kind``. ``leak``: by which part it takes more than it should."""

    name: str
    role: InstanceRole
    kind: str
    leak: float = 0.0
    busy: float = 1.0
    cap_watts: float = field(init=False)
    watts: float = field(init=False)
    past_watts: deque[float] = field(default_factory=lambda: deque(maxlen=round(_READING_AGE_S / STEP_S)))

    def __post_init__(self) -> None:
        self.cap_watts = self.full_watts
        self.watts = _IDLE * self.full_watts

    @property
    def full_watts(self) -> float:
        return FULL_WATTS[self.kind]

    def step(self, rng: random.Random) -> None:
        """``STEP_S`` passes."""
        curves = CURVES[self.kind]
        phase = curves.prompt_draw if self.role is InstanceRole.PROMPT else curves.token_draw
        wanted = self.full_watts * (_IDLE + (phase - _IDLE) * self.busy)
        goal = min(wanted, self.cap_watts) * (1.0 + self.leak)
        self.watts += (goal - self.watts) * (1.0 - math.exp(-STEP_S / _LAG_S))
        self.past_watts.append(self.watts * (1.0 + rng.gauss(0.0, _NOISE)))

    @property
    def true_watts(self) -> float:
        return self.past_watts[-1] if self.past_watts else self.watts

    def time_factor(self) -> float:
        """How many times as long its phase takes under its cap."""
        curves = CURVES[self.kind]
        curve = curves.prompt if self.role is InstanceRole.PROMPT else curves.token
        return curve.factor(self.cap_watts / self.full_watts)

    def read(self, rng: random.Random) -> DevicePower:
        """What a driver would tell."""
        past = self.past_watts[0] if self.past_watts else self.watts
        draw = past * (1.0 + rng.gauss(0.0, _NOISE))
        bounds = (LEAST_WATTS[self.kind], self.full_watts, self.full_watts)
        return DevicePower(self.name, *bounds, self.cap_watts, self.cap_watts, draw, False, True)


class FakeHost:
    """A host's GPUs, of which the first ones are prompt instances and the others token instances.

    Each phase has so much work for each request that at full power both pools are busy all the time: the host is
    sized for its load. ``num_requests`` counts what the slower pool lets through, in units of a second at full power.
    """

    def __init__(self, num_prompt: int, num_token: int, kind: str, rng: random.Random) -> None:
        roles = [InstanceRole.PROMPT] * num_prompt + [InstanceRole.TOKEN] * num_token
        self.gpus = [FakeGpu(f"GPU-{number}", role, kind) for number, role in enumerate(roles)]
        self.num_requests = 0.0
        self.load = 1.0
        self._rng = rng

    @property
    def watts(self) -> float:
        return sum(gpu.true_watts for gpu in self.gpus)

    @property
    def caps_watts(self) -> float:
        return sum(gpu.cap_watts for gpu in self.gpus)

    def step(self) -> None:
        """``STEP_S`` passes."""
        speeds = {role: self._speed(role) for role in (InstanceRole.PROMPT, InstanceRole.TOKEN)}
        rate = min(self.load, *speeds.values())
        self.num_requests += rate * STEP_S
        for gpu in self.gpus:
            gpu.busy = rate / speeds[gpu.role]
            gpu.step(self._rng)

    def read(self) -> PowerRead:
        return PowerRead(tuple(gpu.read(self._rng) for gpu in self.gpus))

    def set_caps(self, devices: tuple[str, ...], caps_watts: tuple[float, ...]) -> None:
        wanted = dict(zip(devices, caps_watts, strict=True))
        for gpu in self.gpus:
            gpu.cap_watts = wanted.get(gpu.name, gpu.cap_watts)

    def _speed(self, role: InstanceRole) -> float:
        """Of a pool, as a part of that at full power."""
        pool = [gpu for gpu in self.gpus if gpu.role is role]
        return sum(1.0 / gpu.time_factor() for gpu in pool) / len(pool)

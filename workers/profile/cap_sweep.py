"""Measures what power caps cost: the time and the power of prompts' and tokens' iterations under a series of caps.

It sets caps on the GPU that it measures, so it needs root, and no server may run there. No cap is above the GPU's
former limit, because a person may have lowered that. It is put back in any case, also when the measurement is
interrupted.
"""

import statistics
import time
from collections.abc import Callable
from math import ceil, floor
from typing import Final, NamedTuple

from actorserve.core.messages import DevicePower
from actorserve.core.timing.profile import CapSweep
from actorserve.errors import ActorserveError
from workers.power.nvml import Gpus

NUM_CAPS: Final = 7
_SAME_WATTS: Final = 0.5  # limits that are read back may be rounded


class CapsError(ActorserveError):
    """Power caps cannot be set here."""


class SweepTimes(NamedTuple):
    """How long each phase runs under a cap before it is measured, because clocks and readings follow late, and how long
    it is measured.
    """

    settle_s: float = 1.0
    measure_s: float = 2.0


_USUAL: Final = SweepTimes()


def sweep_caps(
    gpus: Gpus,
    device: str,
    source: str,
    prompt_s: Callable[[], float],
    token_s: Callable[[], float],
    times: SweepTimes = _USUAL,
    clock: Callable[[], float] = time.monotonic,
) -> CapSweep:
    """Measure the phases on the GPU called ``device``, under even steps of whole watts from its default limit, or its
    former one if that is lower, to its lowest one.

    ``prompt_s`` and ``token_s`` run an iteration of their phase, and return its seconds. The lowest cap is the first
    row. Raises: CapsError.
    """
    former = _power(gpus, device)
    if former.cap_watts is None or former.draw_watts is None:
        raise CapsError(f"GPU {device} does not tell its power limit and its power")
    _set(gpus, device, former.cap_watts)  # whether that is permitted, before anything is changed
    least = ceil(former.least_watts)
    top = floor(min(former.most_watts, former.usual_watts, former.cap_watts))
    if top - least < NUM_CAPS:
        raise CapsError(f"GPU {device} has no room for caps: its limit is {top} W, and the lowest one {least} W")
    caps = [float(round(least + (top - least) * number / (NUM_CAPS - 1))) for number in range(NUM_CAPS)]
    rows: list[tuple[float, float, float, float, float]] = []
    try:
        for cap in reversed(caps):
            _set(gpus, device, cap)
            prompt = _measure(gpus, device, prompt_s, times, clock)
            token = _measure(gpus, device, token_s, times, clock)
            rows.append((cap, prompt[0], token[0], prompt[1], token[1]))
    finally:
        if not gpus.set_cap(device, former.cap_watts):
            raise CapsError(f"GPU {device} did not get its former limit of {former.cap_watts:.0f} W back; set it")
    watts, prompts_s, tokens_s, prompt_watts, token_watts = zip(*reversed(rows), strict=True)
    return CapSweep(watts, prompts_s, tokens_s, prompt_watts, token_watts, source)


def _measure(
    gpus: Gpus, device: str, run_s: Callable[[], float], times: SweepTimes, clock: Callable[[], float]
) -> tuple[float, float]:
    """An iteration's median seconds, and the mean power, in watts."""
    settled_s = clock() + times.settle_s
    while clock() < settled_s:
        run_s()
    seconds: list[float] = []
    watts: list[float] = []
    ends_s = clock() + times.measure_s
    while not seconds or clock() < ends_s:
        seconds.append(run_s())
        draw = _power(gpus, device).draw_watts
        if draw is None:
            raise CapsError(f"GPU {device} does not tell its power any more")
        watts.append(draw)
    return statistics.median(seconds), round(statistics.fmean(watts), 1)


def _set(gpus: Gpus, device: str, watts: float) -> None:
    if not gpus.set_cap(device, watts):
        raise CapsError(f"the power limit of GPU {device} cannot be set, which needs root")
    cap = _power(gpus, device).cap_watts
    if cap is None or abs(cap - watts) > _SAME_WATTS:
        raise CapsError(f"GPU {device} does not take a limit of {watts:.0f} W")


def _power(gpus: Gpus, device: str) -> DevicePower:
    for power in gpus.read():
        if power.device == device:
            return power
    raise CapsError(f"GPU {device} does not answer")

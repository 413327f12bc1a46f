"""How much longer a phase takes under a power cap: curves of time against the cap, with their sources.

Caps are fractions of full power. Of a published curve that is a device's usual power, which is its cap where nothing
else sets one, and of a measured curve the highest cap under which it was measured.

A published curve has few points. Between them the time is a power of the cap, so that a curve is straight where both
axes are logarithmic.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from actorserve.core.timing.profile import CapSweep

_NOISE_FACTOR: Final = 1.02  # of a measured time; more than that is the cap's effect


@dataclass(frozen=True, slots=True)
class PowerCurve:
    """Points (cap as a fraction of full power, time in units of the time at full power).

    ``fractions`` grow strictly and end with 1; ``factors`` never grow and end with 1. Below the first point the first
    piece goes on. One point makes a curve without effect. Raises: ValueError for other points.
    """

    fractions: tuple[float, ...]
    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.fractions or len(self.fractions) != len(self.factors):
            raise ValueError("a power curve needs points, each with a fraction and a factor")
        if self.fractions[0] <= 0.0 or any(not left < right for left, right in pairwise(self.fractions)):
            raise ValueError("a power curve's fractions must be above 0, and grow")
        if any(not right <= left < math.inf for left, right in pairwise(self.factors)):
            raise ValueError("a power curve's factors must be finite, and never grow")
        if self.fractions[-1] != 1.0 or self.factors[-1] != 1.0:
            raise ValueError("a power curve must end at full power, with the factor 1")

    def factor(self, fraction: float) -> float:
        """How many times as long the phase takes under a cap of this fraction of full power, which is above 0."""
        if fraction >= 1.0 or len(self.fractions) == 1:
            return 1.0
        right = max(1, bisect_right(self.fractions, fraction))
        return self.factors[right] * math.pow(fraction / self.fractions[right], self._exponent(right))

    def least_fraction(self, factor: float) -> float:
        """The lowest cap, as a fraction of full power, under which the phase takes at most ``factor`` times as long.

        0 if no cap makes it take so long.
        """
        for right in range(len(self.fractions) - 1, 0, -1):
            exponent = self._exponent(right)
            if exponent < 0.0:
                found = self.fractions[right] * math.pow(max(1.0, factor) / self.factors[right], 1.0 / exponent)
                if found >= self.fractions[right - 1] or right == 1:
                    return found
        return 0.0

    def _exponent(self, right: int) -> float:
        """The power of the cap by which the time changes in the piece that ends at this point: 0 or less."""
        left = right - 1
        return math.log(self.factors[right] / self.factors[left]) / math.log(
            self.fractions[right] / self.fractions[left]
        )


@dataclass(frozen=True, slots=True)
class PhaseCurves:
    """The curves of the two phases on one kind of device, with their source. ``*_draw``: the power that a phase takes
    uncapped, as a fraction of full power. ``full_watts``: full power; None: a device's usual power.
    """

    prompt: PowerCurve
    token: PowerCurve
    prompt_draw: float
    token_draw: float
    source: str
    full_watts: float | None = None


CURVES: Final[Mapping[str, PhaseCurves]] = MappingProxyType(
    {
        "h100": PhaseCurves(
            prompt=PowerCurve((250 / 700, 1.0), (2.0, 1.0)),
            token=PowerCurve((0.25, 0.5, 1.0), (2.0, 1.0, 1.0)),
            prompt_draw=1.0,
            token_draw=0.5,
            source="Splitwise (ISCA 2024), measured on an H100 of 700 W: a cap of 250 W doubles the time of prompts, "
            "and down to 350 W tokens take no longer. Assumed: the shape between those points, that half of 350 W "
            "doubles the time of tokens, and the draws",
        ),
        "a100": PhaseCurves(
            prompt=PowerCurve((250 / 700, 1.0), (2.0, 1.0)),
            token=PowerCurve((0.32, 0.64, 1.0), (2.0, 1.0, 1.0)),
            prompt_draw=1.0,
            token_draw=0.64,
            source="Draws: SplitwiseSim's published measurements of BLOOM-176B on 8 A100, the peak in prompts of 1,024 "
            "tokens and more, and the average over runs of 128 tokens after prompts of 512 (0.44 with Llama-2-70B). "
            "Assumed: that a cap above its draw does not slow a phase, and below it the shape of the H100's curves",
        ),
    }
)
"""By the name in the setting ``power.curves``. A device is the kind of the whole cluster's devices."""


def measured_curves(sweep: CapSweep) -> PhaseCurves:
    """The curves of a GPU whose caps were measured. Its highest cap is its full power.

    Raises: ValueError if the sweep has no two caps, or times that are not above 0.
    """
    full_watts = max(sweep.caps_watts, default=0.0)
    if len(sweep.caps_watts) < 2 or full_watts <= 0.0 or min(*sweep.prompt_s, *sweep.token_s) <= 0.0:
        raise ValueError("the sweep of power caps needs two caps or more, and times above 0")
    fractions = tuple([cap / full_watts for cap in sweep.caps_watts])
    return PhaseCurves(
        prompt=PowerCurve(fractions, _factors(sweep.prompt_s)),
        token=PowerCurve(fractions, _factors(sweep.token_s)),
        prompt_draw=min(1.0, sweep.prompt_watts[-1] / full_watts),
        token_draw=min(1.0, sweep.token_watts[-1] / full_watts),
        source=sweep.source,
        full_watts=full_watts,
    )


def _factors(times_s: tuple[float, ...]) -> tuple[float, ...]:
    """The times in units of the last one. Noise counts for nothing: no time is shorter than one under a higher cap, nor
    is it a little longer than the last one.
    """
    factors = [1.0]
    for time_s in reversed(times_s[:-1]):
        factor = time_s / times_s[-1]
        factors.append(max(factors[-1], 1.0 if factor <= _NOISE_FACTOR else factor))
    return tuple(reversed(factors))

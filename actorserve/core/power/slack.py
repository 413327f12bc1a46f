"""How many times as long the tokens and prompts of a device may take, and the caps under which they do."""

from dataclasses import dataclass
from math import floor, inf, log
from typing import Final

from actorserve.core.power.caps import NUM_STEPS
from actorserve.core.power.curves import PhaseCurves, PowerCurve

PROMPT_SLOWDOWN: Final = 1.15
"""How many times as long prompts take before tokens pass their target. More would cost throughput where both pools are
always busy, and less would let tokens pass their target at three quarters of an A100's power.
"""
_LADDER_STEP: Final = 1.1
_MOST_SLOWDOWN: Final = 100.0
_SLOWER_STEP: Final = 1.15  # how much longer both phases take after each step of the last stage


@dataclass(slots=True)
class Slack:
    """How many times as long a device's tokens may take. Less counts at once. More counts when it would have done for
    ``hold_s``, because a batch that grows again could not get its watts back at once.
    """

    slowdown: float | None = None
    _since_s: float = 0.0
    _least: float = inf  # that would have done since ``_since_s``

    def update(self, tpot_s: float | None, target_s: float, hold_s: float, now: float) -> float:
        """The slowdown that counts, by the time of a token at full power (None: not known)."""
        possible = _possible(tpot_s, target_s)
        self._least = min(self._least, possible)
        if self.slowdown is None or possible <= self.slowdown or now >= self._since_s + hold_s:
            self.slowdown = possible if self.slowdown is None else self._least
            self._least, self._since_s = inf, now
        return self.slowdown


def _possible(tpot_s: float | None, target_s: float) -> float:
    """It is a step of a ladder, so that it seldom changes."""
    if not tpot_s or target_s <= tpot_s:
        return 1.0
    steps = floor(log(min(_MOST_SLOWDOWN, target_s / tpot_s)) / log(_LADDER_STEP))
    return float(_LADDER_STEP**steps)


class Knees:
    """The caps, as fractions of full power, of a device under these curves."""

    def __init__(self, curves: PhaseCurves) -> None:
        self._curves = curves
        self._found: dict[tuple[bool, float], tuple[float, ...]] = {}

    def fractions(self, slowdown: float, *, is_prompt: bool) -> tuple[float, ...]:
        """The caps under which the phase takes ``slowdown`` times as long (the knee), and longer by each step of the
        last stage. A mixed instance goes by its tokens.
        """
        found = self._found.get((is_prompt, slowdown))
        if found is None:
            curve: PowerCurve = self._curves.prompt if is_prompt else self._curves.token
            found = tuple([curve.least_fraction(slowdown * _SLOWER_STEP**number) for number in range(NUM_STEPS)])
            self._found[is_prompt, slowdown] = found
        return found

"""What a device can use of its power: less than all where heat slows it down, or where it keeps to a lower limit.

A hot device can use what it drew at most in the last seconds, because a single reading may be low. It cools under a
ceiling, so heat comes back when the ceiling ends. A device that gets hot again has its ceiling for twice as long as
before, so that caps do not swing for ever.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Final

from actorserve.core.messages import DevicePower

LONGEST_S: Final = 300.0  # that a ceiling lasts after its reason was last seen
_SHORTEST_S: Final = 10.0  # the same for heat that is new
_COOL_S: Final = 2.0 * LONGEST_S  # heat that was not seen for so long is new
_DRAW_S: Final = 3.0  # of the draws, whose highest one counts
_DRAW_NOISE: Final = 0.1  # the part of its draw that a hot device may draw less without a lower ceiling
_LITTLE_WATTS: Final = 5.0  # a ceiling does not fall by less


@dataclass(slots=True)
class Ceiling:
    """Watts that a device cannot pass, until a time. They do not rise meanwhile."""

    watts: float = inf
    until_s: float = 0.0

    def lower(self, watts: float, until_s: float, little_watts: float = _LITTLE_WATTS) -> None:
        """It does not fall by ``little_watts``."""
        if watts < self.watts - little_watts:
            self.watts = watts
        self.until_s = max(until_s, self.until_s)

    def expire(self, now: float) -> None:
        if now >= self.until_s:
            self.watts = inf


@dataclass(slots=True)
class Heat:
    """The ceiling that heat makes."""

    ceiling: Ceiling = field(default_factory=Ceiling)
    _lasts_s: float = _SHORTEST_S
    _hot_s: float | None = None  # when heat was last seen
    _draws: deque[tuple[float, float]] = field(default_factory=deque)  # when, and how many watts

    def update(self, power: DevicePower, now: float) -> None:
        """The device was read."""
        if power.draw_watts is not None:
            self._draws.append((now, power.draw_watts))
        while self._draws and self._draws[0][0] < now - _DRAW_S:
            self._draws.popleft()
        self.ceiling.expire(now)
        if not power.is_throttled or not self._draws:
            return
        if self._hot_s is not None and self.ceiling.watts == inf:
            self._lasts_s = min(LONGEST_S, 2.0 * self._lasts_s) if now < self._hot_s + _COOL_S else _SHORTEST_S
        self._hot_s = now
        watts = max(watts for _, watts in self._draws)
        # It draws no more than its cap, so noise would lower a ceiling again and again.
        self.ceiling.lower(watts, now + self._lasts_s, _DRAW_NOISE * watts)

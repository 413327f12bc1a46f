"""A feed that carries more than its budget although the caps are in force: how far the caps must go below the budget.

Devices may pass their caps for a moment or by a constant error, and a feed may carry more than the devices. Readings
follow the caps late, so the caps must have been in force for a while before a reading counts against them.
"""

from typing import Final

_SETTLE_S: Final = 0.5  # from caps in force to readings that show it
_SURE_S: Final = 3.0  # of excess under the least caps, after which it does not come from readings that are late
_MORE: Final = 1.25  # how much more than the excess is taken, so that noise does not leave some
_RELEASE_S: Final = 10.0  # without excess, before caps rise again
_ROOM: Final = 0.02  # of the budget, that must be free before caps rise, so that noise does not move them


class FeedWatch:
    """``taken_watts`` is how far the caps are below the budget. ``is_beyond_caps``: the least caps do not do."""

    def __init__(self) -> None:
        self.taken_watts = 0.0
        self.is_beyond_caps = False
        self._within_since_s: float | None = None  # since when the caps have been in force
        self._beyond_since_s: float | None = None  # since when there has been an excess under the least caps
        self._changed_s = 0.0  # when there was last an excess or a release

    def excess_watts(self, budget: float, draw: float | None, caps: float, least: float, now: float) -> float:
        """How far to be below ``budget`` from now on. ``draw`` is read now, ``caps`` may be in force, and ``least`` are
        the lowest ones, in watts.
        """
        if draw is None:
            return self.taken_watts
        if caps > budget - self.taken_watts:
            self._within_since_s = None
        elif self._within_since_s is None:
            self._within_since_s = now
        if draw <= budget or caps > least:
            self._beyond_since_s = None
        elif self._beyond_since_s is None:
            self._beyond_since_s = now
        self.is_beyond_caps = self._beyond_since_s is not None and now >= self._beyond_since_s + _SURE_S
        if draw > budget:
            self._changed_s = now
            is_settled = self._within_since_s is not None and now >= self._within_since_s + _SETTLE_S
            if is_settled and caps > least:
                self.taken_watts += (draw - budget) * _MORE
                self._within_since_s = None
        elif self.taken_watts and now >= self._changed_s + _RELEASE_S and draw < budget * (1.0 - _ROOM):
            # Also if the caps are higher than asked for, because devices at their least power cannot go lower.
            self.taken_watts = max(0.0, self.taken_watts - (budget - draw) / 2.0)
            self._changed_s = now
        return self.taken_watts

"""How often each value occurred, in bounded memory however many values there are."""

import math
from bisect import bisect_right
from itertools import accumulate
from typing import Final

from actorserve.sim.statistics import PERCENTILES, between_ranks

MAX_EXACT: Final = 20_000
"""So many distinct values are kept as they are."""

_PARTS: Final = 512
"""Steps between a power of two and the next one."""

MAX_ERROR: Final = 0.5 / _PARTS
"""Of a rounded value, relative to the value."""


_UNITS: Final = 2**52
"""Of the sum in a value of 1."""


class Distribution:
    """Values of at least 0, and how often each of them occurred.

    With more than ``MAX_EXACT`` distinct values, all of them are rounded to the middle of a step, and steps are as in
    an HdrHistogram. Percentiles are exact before, and within ``MAX_ERROR`` after that. No logarithm is taken, so that
    every machine rounds alike. The highest value is exact. The mean is within 2**-52 (of the values' unit) and does not
    depend on the order of the values, or on which of them were added together, because their sum is an integer.
    """

    def __init__(self) -> None:
        self._counts: dict[float, int] = {}
        self._is_rounded = False
        self._total = 0  # in units of 1 / _UNITS
        self._max = 0.0
        self.num_values = 0

    def add(self, value: float, count: int = 1) -> None:
        """The value occurred ``count`` times (at least once)."""
        self.num_values += count
        self._total += int(value * _UNITS) * count
        self._max = max(self._max, value)
        if self._is_rounded:
            value = rounded(value)
        counts = self._counts
        counts[value] = counts.get(value, 0) + count
        if len(counts) > MAX_EXACT and not self._is_rounded:
            self._round()

    @property
    def num_kept(self) -> int:
        """Values in memory."""
        return len(self._counts)

    @property
    def mean(self) -> float:
        return self._total / (_UNITS * self.num_values)

    def summary(self) -> dict[str, float] | None:
        """Mean, highest value and percentiles. None if there are no values."""
        if not self.num_values:
            return None
        values = sorted(self._counts)
        ranks = list(accumulate(self._counts[value] for value in values))

        def at(rank: int) -> float:
            return min(self._max, values[bisect_right(ranks, rank)])

        percentiles = {f"p{percent}": between_ranks(at, self.num_values, percent) for percent in PERCENTILES}
        return {"mean": self.mean, "max": self._max, **percentiles}

    def _round(self) -> None:
        exact, self._counts = self._counts, {}
        self._is_rounded = True
        for value, count in exact.items():
            near = rounded(value)
            self._counts[near] = self._counts.get(near, 0) + count


def rounded(value: float) -> float:
    """The middle of the value's step."""
    mantissa, exponent = math.frexp(value)  # mantissa from 0.5 to 1
    return math.ldexp((math.floor(mantissa * 2 * _PARTS) + 0.5) / (2 * _PARTS), exponent) if value else 0.0

"""Statistics of samples."""

import math
from collections.abc import Callable, Sequence
from typing import Final

PERCENTILES: Final = (50, 90, 95, 99)
"""The percentiles of a run's figures."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of sorted ``values`` (at least one), linear between the two nearest ranks, as numpy does."""
    return between_ranks(values.__getitem__, len(values), percent)


def between_ranks(at: Callable[[int], float], num_values: int, percent: float) -> float:
    """The percentile of ``num_values`` sorted values, where ``at(rank)`` is the value of a rank from 0."""
    rank = (num_values - 1) * percent / 100.0
    low = math.floor(rank)
    below, above = at(low), at(min(low + 1, num_values - 1))
    return below + (above - below) * (rank - low)

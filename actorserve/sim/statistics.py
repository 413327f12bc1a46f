"""Statistics of samples."""

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of sorted ``values`` (at least one), linear between the two nearest ranks, as numpy does."""
    rank = (len(values) - 1) * percent / 100.0
    low = math.floor(rank)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (rank - low)

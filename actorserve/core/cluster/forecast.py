"""What the cluster's demand is, and what it will be if its trend of the recent past goes on."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Demand(NamedTuple):
    """What requests want at a time: tokens of KV, where requests decode; and prompt instances, each as busy as it is to
    be. The memory is left out, because instances that come and go make no trend.
    """

    now: float
    num_tokens: float
    num_requests: float
    num_prompt_instances: float


class Forecast:
    """Samples of the demand. Tokens and requests are predicted separately, because their quotient jumps when few
    requests run.
    """

    def __init__(self) -> None:
        self._samples: deque[Demand] = deque()

    @property
    def last(self) -> Demand | None:
        return self._samples[-1] if self._samples else None

    def add(self, demand: Demand, past_s: float) -> None:
        """Add a sample, and forget what is older than ``past_s``."""
        self._samples.append(demand)
        while self._samples[0].now < demand.now - past_s:
            self._samples.popleft()

    def clear(self) -> None:
        self._samples.clear()

    def after(self, ahead_s: float, least_past_s: float) -> Demand | None:
        """The demand ``ahead_s`` after the last sample; None if samples of less than ``least_past_s`` are known."""
        samples = self._samples
        if not samples or samples[-1].now - samples[0].now < least_past_s:
            return None
        last = samples[-1]
        tokens = [(sample.now, sample.num_tokens) for sample in samples]
        requests = [(sample.now, sample.num_requests) for sample in samples]
        prompts = [(sample.now, sample.num_prompt_instances) for sample in samples]
        return Demand(
            last.now + ahead_s,
            max(0.0, last.num_tokens + ahead_s * _slope(tokens)),
            max(0.0, last.num_requests + ahead_s * _slope(requests)),
            max(0.0, last.num_prompt_instances + ahead_s * _slope(prompts)),
        )

    def validate(self) -> None:
        """Raises: AssertionError if samples do not stand in order of time."""
        times_s = [sample.now for sample in self._samples]
        assert times_s == sorted(times_s), "samples stand in order of time"


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the line that fits the points best (least squares); 0 if all points have the same time."""
    mean_x = sum([x for x, _ in points]) / len(points)
    mean_y = sum([y for _, y in points]) / len(points)
    spread = sum([(x - mean_x) ** 2 for x, _ in points])
    return sum([(x - mean_x) * (y - mean_y) for x, y in points]) / spread if spread else 0.0

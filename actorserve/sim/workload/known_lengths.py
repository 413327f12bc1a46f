"""A predictor that knows the outputs' lengths but for an error, as only a simulation can."""

import math
import random

from actorserve.core.request import Request

_SQRT_HALF = math.sqrt(0.5)
_FAR = 6.0  # standard deviations beyond which the tail's own formula is used


class KnownLengths:
    """Estimates each output's length with a lognormal error: estimate over length has the median 1, and its logarithm
    the standard deviation ``error``. A request's error depends on its id and ``seed`` alone.

    Requests that go on beyond their estimates are expected to go on, as the error's distribution says.
    """

    def __init__(self, error: float, seed: int = 0) -> None:
        self._error = error
        self._seed = seed

    def forecast(self, request: Request) -> "KnownLength":
        drawn = random.Random(f"{self._seed} error of {request.request_id}").gauss(0.0, 1.0)
        return self.estimated(request.sampling.max_tokens * math.exp(self._error * drawn))

    def estimated(self, estimate: float) -> "KnownLength":
        """The forecast for an output that is estimated at so many tokens."""
        return KnownLength(estimate, self._error)


class KnownLength:
    """The forecast of one request, whose output has about ``estimate`` tokens."""

    __slots__ = ("_error", "estimate")

    def __init__(self, estimate: float, error: float) -> None:
        self.estimate = estimate
        self._error = error

    def rest(self, num_output: int) -> float:
        """The mean of what is left, given that more than ``num_output`` tokens come."""
        error = self._error
        if not error:
            return max(1.0, self.estimate - num_output)
        if not num_output:
            return self.estimate * math.exp(error * error / 2.0)
        beyond = math.log(num_output / self.estimate) / error
        if beyond > _FAR:
            return max(1.0, num_output * error / beyond)
        whole = self.estimate * math.exp(error * error / 2.0) * _above(beyond - error) / _above(beyond)
        return max(1.0, whole - num_output)

    def ended(self, num_output: int) -> None:
        """There is nothing to learn."""


def _above(deviations: float) -> float:
    """The probability of a normal variable above so many standard deviations."""
    return 0.5 * math.erfc(deviations * _SQRT_HALF)

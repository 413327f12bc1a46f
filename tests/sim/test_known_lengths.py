"""The simulator's predictor: it knows lengths but for an error of a known distribution."""

import math
from itertools import pairwise
from statistics import NormalDist, mean, median, stdev

import pytest

from actorserve.sim.workload.known_lengths import KnownLengths
from tests.core.harness.policy_driver import request

LENGTH = 200


def estimates(error: float, seed: int = 0) -> list[float]:
    known = KnownLengths(error, seed)
    return [known.forecast(request(f"{number}", 1, max_tokens=LENGTH)).estimate for number in range(4000)]


def test_without_an_error_it_is_an_oracle() -> None:
    """It tells exactly what is left, and at least one token."""
    forecast = KnownLengths(0.0).forecast(request("a", 1, max_tokens=LENGTH))
    assert [forecast.rest(number) for number in (0, 50, 199, 300)] == [200.0, 150.0, 1.0, 1.0]


@pytest.mark.parametrize("error", [0.25, 0.5, 1.0])
def test_the_error_is_lognormal(error: float) -> None:
    """The median estimate is right, and the logarithm's standard deviation is the error."""
    logarithms = [math.log(estimate) for estimate in estimates(error)]
    assert math.exp(median(logarithms)) == pytest.approx(LENGTH, rel=0.08)
    assert stdev(logarithms) == pytest.approx(error, rel=0.05)


def test_an_error_belongs_to_a_request() -> None:
    """The same request has the same estimate on every instance, and another one with another seed."""
    assert estimates(0.5)[:9] == estimates(0.5)[:9]
    assert estimates(0.5)[:9] != estimates(0.5, seed=1)[:9]


@pytest.mark.parametrize("num_output", [0, 60, 200, 500, 900])
def test_what_is_left_is_the_mean_of_what_may_be(num_output: int) -> None:
    """Of the lengths that the estimate allows, only those above what was generated count."""
    error, estimate = 0.5, 150.0
    forecast = KnownLengths(error).estimated(estimate)
    steps = [(place + 0.5) / 200_000 for place in range(200_000)]
    normal = NormalDist()
    lengths = [estimate * math.exp(error * normal.inv_cdf(step)) for step in steps]
    assert forecast.rest(num_output) == pytest.approx(
        mean(length - num_output for length in lengths if length > num_output), rel=0.02
    )


def test_it_stays_finite_far_beyond_the_estimate() -> None:
    """What is left goes on growing with what was generated, without a jump where the formula changes."""
    forecast = KnownLengths(0.25).estimated(1.0)
    rests = [forecast.rest(number) for number in range(1, 3000)]
    assert all(1.0 <= rest < 3000 for rest in rests)
    assert all(later <= 1.15 * rest + 1.0 for rest, later in pairwise(rests))

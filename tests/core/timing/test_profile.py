"""Profiles: curves through points, links, and how long iterations take."""

import math
from bisect import bisect_left
from dataclasses import replace

import pytest

from actorserve.core.messages import Speed
from actorserve.core.timing.profile import Curve
from tests.core.harness.profiles import PROFILE

CURVE = Curve((1, 100, 300), (10.0, 10.0, 30.0))


@pytest.mark.parametrize(
    ("x", "y"), [(0, 10.0), (1, 10.0), (50, 10.0), (100, 10.0), (200, 20.0), (300, 30.0), (400, 40.0)]
)
def test_a_curve_goes_through_its_points(x: float, y: float) -> None:
    """It is linear between points, constant before the first, and beyond the last it continues the last piece."""
    assert CURVE(x) == pytest.approx(y)


@pytest.mark.parametrize(
    ("xs", "ys"),
    [
        ((), ()),
        ((1.0,), (1.0, 2.0)),
        ((1.0, 1.0), (1.0, 2.0)),
        ((2.0, 1.0), (1.0, 2.0)),
        ((1.0, math.nan), (1.0, 2.0)),
        ((1.0, 2.0), (2.0, 1.0)),
        ((1.0,), (-1.0,)),
        ((1.0,), (math.inf,)),
        ((1.0,), (math.nan,)),
    ],
)
def test_wrong_points_are_refused(xs: tuple[float, ...], ys: tuple[float, ...]) -> None:
    """Points that are missing, out of order, falling or not finite make no curve."""
    with pytest.raises(ValueError, match="curve"):
        Curve(xs, ys)


def test_prompts_together_take_what_one_of_their_sum_takes() -> None:
    """The attention between the prompts is subtracted, and a chunk's own context is added."""
    one = PROFILE.prefill_s(600)
    assert PROFILE.step_s([(600, 0)], 0, 0) == one
    # Attention grows by 600 * 1e-8 s for each token between 100 and 1,100.
    assert PROFILE.step_s([(200, 0), (400, 0)], 0, 0) == pytest.approx(one - (500 - 100 - 300) * 600 * 1e-8)
    assert PROFILE.step_s([(600, 10_000)], 0, 0) == pytest.approx(one + 600 * 10_000 * 1e-8)
    assert PROFILE.prefill_s(600, 10_000) == pytest.approx(one + 600 * 10_000 * 1e-8)
    assert PROFILE.prefill_s(1, 10_000) == pytest.approx(0.01 + PROFILE.decode_context(10_000))


def test_short_prompts_share_the_reading_of_weights_up_to_the_knee() -> None:
    """Prompts that would each be bound by reading weights are together bound by computing."""
    assert PROFILE.step_s([(50, 0)], 0, 0) == pytest.approx(0.01)
    assert PROFILE.step_s([(50, 0)] * 12, 0, 0) > 0.055


def test_decodes_and_prefills_share_an_iteration() -> None:
    """The iteration takes as long as a prompt of all tokens, or as the decodes if they take longer, with the decodes'
    context.
    """
    decode_s = PROFILE.decode_s(50, 1000)
    assert decode_s == pytest.approx(0.0149 + 0.001)
    assert PROFILE.step_s([], 50, 1000) == decode_s
    assert PROFILE.step_s([(0, 7)], 50, 1000) == decode_s
    assert PROFILE.step_s([(50, 0)], 50, 1000) == pytest.approx(decode_s)
    assert PROFILE.step_s([(150, 0)], 50, 1000) == pytest.approx(0.02 + 0.001)
    sampling = replace(PROFILE, decode_mixed_s=1e-4)
    assert sampling.step_s([], 50, 1000) == decode_s
    assert sampling.step_s([(150, 0)], 50, 1000) == pytest.approx(0.02 + 0.001 + 50 * 1e-4)


def test_a_chunk_reads_the_weights_again() -> None:
    """A prompt in chunks takes as long as whole, and the weights are read once more for each further chunk."""
    free = Curve((0,), (0.0,))
    steady = replace(PROFILE, prefill=Curve((1, 1000), (0.01, 1.009)), prefill_context_s=0.0, decode_context=free)
    for weights_s, further_s in ((0.0, 0.009), (0.005, 0.009), (0.01, 0.01)):  # the curve begins 9 ms above 0
        profile = replace(steady, weights_s=weights_s)
        assert profile.prefill_s(400) + profile.prefill_s(600, 400) == pytest.approx(
            profile.prefill_s(1000) + further_s
        )
    with pytest.raises(ValueError, match=r"weights_s is 0\.011: expected at most 0\.01, the shortest iteration"):
        replace(PROFILE, weights_s=0.011)


def test_pauses_grow_with_requests() -> None:
    """Between iterations lies the profile's pause, and more for each request."""
    assert PROFILE.idle_s(64) == 0.0
    assert replace(PROFILE, pause_s=0.001, pause_row_s=1e-5).idle_s(64) == pytest.approx(0.00164)


def test_nothing_takes_no_time() -> None:
    """No tokens, no requests and no bytes take no time."""
    assert PROFILE.prefill_s(0, 100) == 0.0
    assert PROFILE.decode_s(0, 0) == 0.0
    assert PROFILE.step_s([], 0, 0) == 0.0
    assert PROFILE.swap.copy_s(0) == 0.0
    assert PROFILE.swap.copy_s(1000) == pytest.approx(0.002)


def test_the_coordinator_learns_the_prefill_curve() -> None:
    """A worker's speed has the prefill curve's points, and the shortest iteration."""
    speed = PROFILE.speed()
    assert speed == Speed((1, 100, 1100), (0.01, 0.01, 0.11), 0.01)
    assert bisect_left(speed.prefill_tokens, 100) == 1

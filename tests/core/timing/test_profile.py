"""Profiles: curves through points, links, and how long iterations take."""

import math
from bisect import bisect_left

import pytest
from hypothesis import given, strategies as st

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


def test_how_far_a_budget_reaches() -> None:
    """Flat pieces cost only the extra, and on a curve that stays flat the reach is infinite."""
    assert CURVE.reach(0, 5.0) == pytest.approx(150)
    assert CURVE.reach(50, 5.0) == pytest.approx(100)
    assert CURVE.reach(100, 5.0, scale=2.0) == pytest.approx(25)
    assert CURVE.reach(100, 6.0, extra=0.1) == pytest.approx(30)
    assert CURVE.reach(100, 100.0, extra=-1.0) == math.inf
    assert CURVE.reach(400, 5.0) == pytest.approx(50)
    assert CURVE.reach(0, math.inf) == math.inf
    assert Curve((1,), (1.0,)).reach(0, 0.0) == math.inf
    assert Curve((1,), (1.0,)).reach(5, 3.0, extra=0.5) == pytest.approx(6)


_STEPS = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=6)


@given(_STEPS, st.integers(0, 100), st.floats(0.1, 100.0), st.floats(0.1, 3.0), st.floats(0.01, 1.0))
def test_a_budget_reaches_as_far_as_its_cost_says(
    steps: list[tuple[int, int]], start: int, budget: float, scale: float, extra: float
) -> None:
    """Going as far as a budget reaches costs exactly the budget."""
    xs, ys = [1.0], [5.0]
    for right, up in steps:
        xs.append(xs[-1] + right)
        ys.append(ys[-1] + up)
    curve = Curve(tuple(xs), tuple(ys))
    num = curve.reach(start, budget, scale, extra)
    assert scale * (curve(start + num) - curve(start)) + extra * num == pytest.approx(budget)


def test_prompts_together_take_what_one_of_their_sum_takes() -> None:
    """The attention between the prompts is subtracted, and a chunk's own context is added."""
    one = PROFILE.prefill_s(600)
    assert PROFILE.step_s([(600, 0)], 0, 0) == one
    assert PROFILE.step_s([(200, 0), (400, 0)], 0, 0) == pytest.approx(one - 80_000 * 1e-8)
    assert PROFILE.step_s([(600, 1000)], 0, 0) == pytest.approx(one + 600_000 * 1e-8)
    assert PROFILE.prefill_s(600, 1000) == pytest.approx(one + 600_000 * 1e-8)


def test_short_prompts_share_the_reading_of_weights_up_to_the_knee() -> None:
    """Prompts that would each be bound by reading weights are together bound by computing."""
    assert PROFILE.step_s([(50, 0)], 0, 0) == pytest.approx(0.01)
    assert PROFILE.step_s([(50, 0)] * 12, 0, 0) > 0.055


def test_decodes_and_prefills_share_an_iteration() -> None:
    """Prefill tokens add to the decodes, and below the knee they fill what the decodes leave."""
    decode_s = PROFILE.decode_s(50, 1000)
    assert decode_s == pytest.approx(0.0149 + 0.001)
    assert PROFILE.step_s([], 50, 1000) == decode_s
    assert PROFILE.step_s([(0, 7)], 50, 1000) == decode_s
    assert PROFILE.step_s([(50, 0)], 50, 1000) == pytest.approx(decode_s)
    assert PROFILE.step_s([(150, 0)], 50, 1000) == pytest.approx(decode_s + 100 * 1e-4 - 150 * 50 * 1e-8)


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

"""Tokens that come faster than they must give up watts, but not for a moment only."""

import pytest

from actorserve.core.power.governor import DeviceId, Use
from actorserve.core.power.slack import Slack
from tests.core.power.plant import TOKEN, equal_pools

TARGET_S, HOLD_S = 0.1, 5.0


def slowdown(slack: Slack, tpot_s: float | None, now: float) -> float:
    return slack.update(tpot_s, TARGET_S, HOLD_S, now)


def test_the_first_slowdown_counts_at_once() -> None:
    """It is the highest step of the ladder that keeps the target, and none where the time of a token is not known."""
    assert slowdown(Slack(), 0.08, 0.0) == pytest.approx(1.1**2)
    assert slowdown(Slack(), 0.2, 0.0) == 1.0
    assert slowdown(Slack(), None, 0.0) == 1.0


def test_less_counts_at_once_and_more_after_a_time() -> None:
    """A larger batch gets its watts at once. A smaller one gives up what was not needed for ``hold_s``."""
    slack = Slack()
    assert slowdown(slack, 0.08, 0.0) == pytest.approx(1.21)
    assert slowdown(slack, 0.095, 1.0) == 1.0
    assert slowdown(slack, 0.07, 2.0) == 1.0
    assert slowdown(slack, 0.09, 3.0) == 1.0
    assert slowdown(slack, 0.07, 5.9) == 1.0
    assert slowdown(slack, 0.07, 6.0) == pytest.approx(1.1), "the largest batch since then needs so much"
    assert slowdown(slack, 0.07, 10.9) == pytest.approx(1.1)
    assert slowdown(slack, 0.07, 11.0) == pytest.approx(1.1**3)


def test_tokens_that_come_fast_enough_may_be_slowed() -> None:
    """With room to the target time of a token, the cap goes below the flat part of the curve."""
    plant = equal_pools(1, budget=1000.0)
    plant.uses[DeviceId("a", "t0")] = Use(TOKEN, tpot_s=0.1 / 1.25)
    plant.run(5.0)
    assert (plant.cap("p0"), plant.cap("t0")) == (720.0 - 20.0, 300.0)
    plant.uses[DeviceId("a", "t0")] = Use(TOKEN, tpot_s=0.2)
    plant.run(12.0)
    assert (plant.cap("p0"), plant.cap("t0")) == (650.0, 350.0), "it misses its target already, so prompts pay as well"


def test_a_batch_that_shrinks_for_a_moment_keeps_its_watts() -> None:
    """While batches grow and shrink every second, tokens always have the watts that the largest one needs, and no watts
    of the budget lie idle. When a batch stays small, its watts go to prompts.
    """
    plant = equal_pools(budget=3920.0)
    small, large = Use(TOKEN, tpot_s=0.1 / 1.5), Use(TOKEN, tpot_s=0.1)
    for second in range(30):
        plant.uses[DeviceId("a", "t0")] = small if second % 2 else large
        plant.uses[DeviceId("a", "t1")] = large if second % 2 else small
        plant.run(1.0)
        if second > 10:
            assert (plant.cap("t0"), plant.cap("t1")) == pytest.approx((350.0, 350.0), abs=1.0)
            assert plant.caps() >= 3920.0 - 8.0
    plant.uses[DeviceId("a", "t0")] = small
    plant.run(12.0)
    assert plant.cap("t0") < 300.0
    assert plant.caps() >= 3920.0 - 8.0

"""What heat takes from a device: what it drew at most, for longer each time that it gets hot again."""

from dataclasses import replace
from math import inf

import pytest

from actorserve.core.messages import DevicePower
from actorserve.core.power.ceiling import Ceiling, Heat
from actorserve.core.power.governor import DeviceId
from tests.core.power.plant import equal_pools, h100


def reading(draw_watts: float | None, *, is_hot: bool = False) -> DevicePower:
    return replace(h100("x"), draw_watts=draw_watts, is_throttled=is_hot)


def test_a_ceiling_does_not_rise_while_it_lasts() -> None:
    """It falls by more than a little, lasts until the latest time, and then ends."""
    ceiling = Ceiling()
    for watts, expected in ((400.0, 400.0), (500.0, 400.0), (396.0, 400.0), (390.0, 390.0)):
        ceiling.lower(watts, 10.0)
        assert ceiling.watts == expected
    ceiling.expire(9.9)
    assert ceiling.watts == 390.0
    ceiling.expire(10.0)
    assert ceiling.watts == inf


def test_one_low_reading_of_a_hot_device_does_not_count() -> None:
    """The highest draw of the last seconds is what it can use, and less only when that has lasted."""
    heat = Heat()
    heat.update(reading(600.0), 0.0)
    heat.update(reading(100.0, is_hot=True), 1.0)
    assert heat.ceiling.watts == 600.0
    heat.update(reading(None, is_hot=True), 2.0)
    assert heat.ceiling.watts == 600.0
    heat.update(reading(100.0, is_hot=True), 3.5)
    assert heat.ceiling.watts == 100.0


def test_heat_of_a_device_whose_draw_is_not_known_makes_no_ceiling() -> None:
    """Nothing tells what it can use."""
    heat = Heat()
    heat.update(reading(None, is_hot=True), 1.0)
    assert heat.ceiling.watts == inf


def heat_lasts_s(heat: Heat, now: float) -> float:
    """How long the ceiling lasts after heat that is seen at this time."""
    heat.update(reading(500.0, is_hot=True), now)
    return heat.ceiling.until_s - now


def test_heat_that_comes_back_lasts_twice_as_long() -> None:
    """Up to a bound, and from the start again after a long time without heat."""
    heat, now, found = Heat(), 0.0, []
    for _ in range(7):
        found.append(heat_lasts_s(heat, now))
        assert heat_lasts_s(heat, now + 0.25) == found[-1], "it is the same heat"
        now += found[-1] + 2.0
    assert found == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    assert heat_lasts_s(heat, now + 900.0) == 10.0


def test_caps_of_a_badly_cooled_device_swing_less_and_less() -> None:
    """A device that gets hot at its cap, and cools below it, is raised a few times in an hour only."""
    plant = equal_pools(2, budget=2000.0)
    hot, num_rises, before = DeviceId("a", "p0"), 0, 0.0
    for _ in range(4 * 1800):
        cap = plant.cap("p0")
        num_rises += cap > before
        before = cap
        plant.devices[hot] = replace(plant.devices[hot], is_throttled=cap > 560.0, draw_watts=min(cap, 550.0))
        plant.run(0.25)
    assert num_rises <= 11
    assert plant.caps() == pytest.approx(2000.0, abs=4.0)

"""Curves of time against cap pass through the published points, and know how far a cap may go."""

import pytest
from hypothesis import given, strategies as st

from actorserve.core.power.curves import CURVES, PowerCurve, measured_curves
from actorserve.core.power.governor import PowerConfig
from actorserve.core.timing.profile import CapSweep
from tests.core.power.plant import Plant, equal_pools


def test_the_published_points_hold() -> None:
    """A cap of 250 of 700 W doubles the time of prompts, and down to 350 W tokens take no longer."""
    h100 = CURVES["h100"]
    assert h100.prompt.factor(250 / 700) == pytest.approx(2.0)
    assert h100.prompt.least_fraction(2.0) == pytest.approx(250 / 700)
    assert [h100.token.factor(fraction) for fraction in (1.2, 1.0, 0.7, 0.5)] == [1.0] * 4
    assert h100.token.least_fraction(1.0) == 0.5


def test_every_curve_names_its_source() -> None:
    """Each kind of device says where its numbers come from, and what is assumed."""
    assert all("ssumed" in curves.source and len(curves.source) > 80 for curves in CURVES.values())


@given(kind=st.sampled_from(sorted(CURVES)), phase=st.sampled_from(["prompt", "token"]), factor=st.floats(1.0, 4.0))
def test_the_least_cap_is_the_least(kind: str, phase: str, factor: float) -> None:
    """Under the least cap for a time the phase takes that time, and longer under any lower one."""
    curve: PowerCurve = getattr(CURVES[kind], phase)
    least = curve.least_fraction(factor)
    assert 0.0 < least <= 1.0
    assert curve.factor(least) == pytest.approx(factor, rel=1e-6)
    assert curve.factor(0.99 * least) > factor


@pytest.mark.parametrize(
    ("fractions", "factors"),
    [
        ((), ()),
        ((0.5, 1.0), (1.0,)),
        ((0.0, 1.0), (2.0, 1.0)),
        ((1.0, 0.5), (1.0, 1.0)),
        ((0.5, 1.0), (1.0, 2.0)),
        ((0.5, 0.9), (2.0, 1.0)),
        ((0.5, 1.0), (float("inf"), 1.0)),
        ((0.5, 1.0), (3.0, 2.0)),
    ],
)
def test_other_points_make_no_curve(fractions: tuple[float, ...], factors: tuple[float, ...]) -> None:
    """A curve that grows with the cap, or does not end at full power, is refused."""
    with pytest.raises(ValueError, match="a power curve"):
        PowerCurve(fractions, factors)


def test_one_point_has_no_effect() -> None:
    """A curve of full power alone says that no cap slows the phase."""
    flat = PowerCurve((1.0,), (1.0,))
    assert (flat.factor(0.1), flat.least_fraction(1.0)) == (1.0, 0.0)


def test_measured_times_become_curves() -> None:
    """The highest cap is full power. A time that is shorter than one under a higher cap is noise."""
    sweep = CapSweep(
        (200.0, 300.0, 400.0), (2.0, 1.1, 1.0), (1.5, 0.98, 1.0), (200.0, 300.0, 390.0), (150.0,) * 3, "here"
    )
    curves = measured_curves(sweep)
    assert curves.prompt == PowerCurve((0.5, 0.75, 1.0), (2.0, 1.1, 1.0))
    assert curves.token == PowerCurve((0.5, 0.75, 1.0), (1.5, 1.0, 1.0))
    assert (curves.prompt_draw, curves.token_draw, curves.source) == (0.975, 0.375, "here")
    assert curves.full_watts == 400.0
    assert curves.token.least_fraction(1.0) == 0.75


def test_a_little_noise_in_measured_times_does_not_move_the_knee() -> None:
    """Tokens that take 0.1 % longer under every lower cap are not slowed by it."""
    times_s = (1.5, 1.03, 1.001, 1.001, 1.0)
    sweep = CapSweep((200.0, 250.0, 300.0, 350.0, 400.0), times_s, times_s, (200.0,) * 5, (150.0,) * 5, "here")
    curves = measured_curves(sweep)
    assert curves.token.factors == (1.5, 1.03, 1.0, 1.0, 1.0)
    assert curves.token.least_fraction(1.0) == 0.75


def test_measured_caps_are_watts_whatever_the_usual_power_is() -> None:
    """A device whose caps were measured below its usual power keeps the knee that was measured."""
    sweep = CapSweep((200.0, 300.0, 400.0), (2.0, 1.2, 1.0), (1.5, 1.0, 1.0), (390.0,) * 3, (150.0,) * 3, "here")
    plant = equal_pools(1, budget=1000.0)
    plant = Plant(PowerConfig(budget_watts_of={"a": 1000.0}, curves=measured_curves(sweep)), plant.devices, plant.uses)
    plant.run(5.0)
    assert (plant.cap("p0"), plant.cap("t0")) == (700.0, 300.0)

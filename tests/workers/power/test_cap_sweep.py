"""What power caps cost is measured on a fake driver, and the former limit comes back, however the measurement ends."""

from dataclasses import replace

import pytest

from actorserve.core.power.curves import measured_curves
from actorserve.core.timing.profile import CapSweep, Curve
from actorserve.profile_files import parse_profile, profile_text
from tests.core.harness.driver import PROFILE
from tests.workers.power.fake_driver import NO_PERMISSION, WATT, FakeDriver
from tools.profiling import __main__ as command
from tools.profiling.caps import open_gpu
from tools.profiling.errors import NoCapsError
from workers.power.nvml import Gpus, open_gpus
from workers.profile.cap_sweep import NUM_CAPS, CapsError, SweepTimes, sweep_caps

FORMER_WATTS = 650.0  # an operator's own limit


class Card:
    """The first GPU of a driver, whose iterations follow its cap. Each iteration takes a second of the clock."""

    def __init__(self, driver: FakeDriver, fails_after: int = 1000, error: type[BaseException] = ValueError) -> None:
        self.driver = driver
        self.now = 0.0
        self.num_left = fails_after
        self.error = error
        self.most_watts = 0.0  # that an iteration could take
        driver.put(0, "limit", int(FORMER_WATTS) * WATT)

    def prompt_s(self) -> float:
        """Twice the cap is twice as fast, at all power that there is."""
        return self._run(self.driver.limit(0), 70.0 / self.driver.limit(0))

    def token_s(self) -> float:
        """It needs 350 W."""
        return self._run(min(350.0, self.driver.limit(0)), 0.01 * max(1.0, 350.0 / self.driver.limit(0)))

    def _run(self, watts: float, seconds: float) -> float:
        self.num_left -= 1
        if not self.num_left:
            raise self.error
        self.now += 1.0
        self.most_watts = max(self.most_watts, self.driver.limit(0))
        self.driver.put(0, "draw", round(watts * WATT))
        return seconds

    def sweep(self) -> CapSweep:
        gpus = open_gpus()
        assert isinstance(gpus, Gpus)
        times = SweepTimes(1.0, 2.0)
        return sweep_caps(gpus, "GPU-0", "measured on a fake", self.prompt_s, self.token_s, times, lambda: self.now)


def test_both_phases_are_timed_under_each_cap(loaded_driver: FakeDriver) -> None:
    """Seven even caps from the least to the default limit, with times and power; a profile's file keeps them."""
    card = Card(loaded_driver)
    loaded_driver.put(0, "limit", 700 * WATT)
    caps = card.sweep()
    steady = Curve((1.0, 2.0), (0.01, 0.01))
    profile = replace(PROFILE, dtype="float32", decode=steady, decode_context=steady, caps=caps)
    assert profile.caps is not None
    assert profile.caps.caps_watts == (200.0, 283.0, 367.0, 450.0, 533.0, 617.0, 700.0)
    assert profile.caps.prompt_s == pytest.approx([70.0 / cap for cap in profile.caps.caps_watts])
    assert profile.caps.token_s == pytest.approx([0.0175, 3.5 / 283.0, 0.01, 0.01, 0.01, 0.01, 0.01])
    assert profile.caps.prompt_watts == profile.caps.caps_watts
    assert profile.caps.token_watts == (200.0, 283.0, 350.0, 350.0, 350.0, 350.0, 350.0)
    assert len(profile.caps.caps_watts) == NUM_CAPS
    assert loaded_driver.limit(0) == 700.0
    assert parse_profile(profile_text(profile), "a test").caps == profile.caps


def test_a_limit_that_a_person_lowered_is_not_passed(loaded_driver: FakeDriver) -> None:
    """Caps begin at that limit, which is the full power of the measured curves."""
    card = Card(loaded_driver)
    caps = card.sweep()
    assert caps.caps_watts == (200.0, 275.0, 350.0, 425.0, 500.0, 575.0, 650.0)
    assert caps.prompt_s[-1] == 70.0 / FORMER_WATTS
    assert caps.prompt_watts[-1] == FORMER_WATTS
    assert card.most_watts == loaded_driver.limit(0) == FORMER_WATTS
    curves = measured_curves(caps)
    assert curves.full_watts == FORMER_WATTS
    assert curves.prompt.factor(350.0 / FORMER_WATTS) == pytest.approx(FORMER_WATTS / 350.0)


def test_a_limit_that_a_person_raised_is_not_used(loaded_driver: FakeDriver) -> None:
    """Caps above the default limit are not measured, because the governor sets none. The raised limit comes back."""
    loaded_driver.put(0, "usual", 500 * WATT)
    card = Card(loaded_driver)
    assert card.sweep().caps_watts == (200.0, 250.0, 300.0, 350.0, 400.0, 450.0, 500.0)
    assert card.most_watts == 500.0
    assert loaded_driver.limit(0) == FORMER_WATTS


def test_without_room_below_the_limit_nothing_is_measured(loaded_driver: FakeDriver) -> None:
    """A limit near the lowest one leaves no steps."""
    card = Card(loaded_driver, fails_after=1)
    loaded_driver.put(0, "limit", 203 * WATT)
    with pytest.raises(CapsError, match="its limit is 203 W, and the lowest one 200 W"):
        card.sweep()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("fails_after", [1, 5, 20])
def test_the_former_limit_comes_back(fails_after: int, error: type[BaseException], loaded_driver: FakeDriver) -> None:
    """An engine that fails, and a person who interrupts."""
    with pytest.raises(error):
        Card(loaded_driver, fails_after, error).sweep()
    assert loaded_driver.limit(0) == FORMER_WATTS


def test_without_permission_nothing_is_changed(loaded_driver: FakeDriver) -> None:
    """It says so before anything is measured."""
    card = Card(loaded_driver, fails_after=1)
    loaded_driver.put(0, "set_error", NO_PERMISSION)
    with pytest.raises(CapsError, match="cannot be set, which needs root"):
        card.sweep()
    assert loaded_driver.limit(0) == FORMER_WATTS


def test_a_gpu_that_ignores_caps_is_not_measured(loaded_driver: FakeDriver) -> None:
    """A limit that does not follow would make a flat curve."""
    card = Card(loaded_driver)
    loaded_driver.put(0, "deaf", 1)
    with pytest.raises(CapsError, match="does not take a limit of 575 W"):
        card.sweep()


def test_where_nothing_can_be_capped_the_command_stops_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CPUs have no caps."""
    with pytest.raises(NoCapsError, match="--caps needs a GPU"):
        open_gpu("cpu")
    monkeypatch.setattr(command, "_run", lambda _: open_gpu("cpu"))
    assert command.main(["--caps"]) == 1
    assert "--caps needs a GPU" in capsys.readouterr().err

"""The power of the whole host comes from its meter, or is unknown."""

from pathlib import Path

import pytest

from workers.power.caps import PowerCaps
from workers.power.feed import FeedMeter
from workers.power.former_limits import FormerLimits


def sensor(folder: Path, number: int, name: str, watts: str) -> None:
    path = folder / f"hwmon{number}"
    path.mkdir()
    (path / "name").write_text(f"{name}\n")
    (path / "power1_average").write_text(f"{watts}\n")


def test_power_supplies_are_summed_and_other_sensors_are_not(tmp_path: Path) -> None:
    """Of all sensors only power meters measure the feed; the actuator's reading has their sum."""
    sensor(tmp_path, 0, "coretemp", "9000000")
    sensor(tmp_path, 1, "power_meter", "450000000")
    sensor(tmp_path, 2, "power_meter", "460500000")
    assert FeedMeter(tmp_path).watts() == pytest.approx(910.5)
    caps = PowerCaps(None, FormerLimits(tmp_path / "state"), FeedMeter(tmp_path))
    assert caps.read().feed_watts == pytest.approx(910.5)


def test_a_feed_that_is_not_measured_is_unknown(tmp_path: Path) -> None:
    """Without a meter, and with one of two that does not tell, no number is made up."""
    assert FeedMeter(tmp_path).watts() is None
    sensor(tmp_path, 1, "power_meter", "450000000")
    sensor(tmp_path, 2, "power_meter", "")
    assert FeedMeter(tmp_path).watts() is None

"""Former limits outlast the actuator, however it ends."""

import json
from pathlib import Path

import pytest

from tests.workers.power.fake_driver import GPU_IS_LOST, WATT, FakeDriver
from workers.power.caps import PowerCaps
from workers.power.former_limits import FormerLimits
from workers.power.nvml import Gpus, open_gpus


def opened() -> Gpus:
    gpus = open_gpus()
    assert isinstance(gpus, Gpus)
    return gpus


def kept(folder: Path) -> dict[str, float]:
    watts: dict[str, float] = json.loads((folder / "former-limits.json").read_text())["watts"]
    return watts


def test_former_limits_are_on_disk_before_a_cap_is_set(
    loaded_driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a limit is set the former one is in the file, also of an operator's own limit, and later caps keep it."""
    loaded_driver.put(0, "limit", 600 * WATT)
    caps = PowerCaps(opened(), FormerLimits(tmp_path / "state"))
    set_cap = Gpus.set_cap

    def checked(gpus: Gpus, device: str, watts: float) -> bool:
        assert kept(tmp_path / "state")[device] in (600.0, 700.0)
        return set_cap(gpus, device, watts)

    monkeypatch.setattr(Gpus, "set_cap", checked)
    caps.set_caps(("GPU-0", "GPU-1"), (300.0, 350.0))
    caps.set_caps(("GPU-0",), (250.0,))
    assert kept(tmp_path / "state") == {"GPU-0": 600.0, "GPU-1": 700.0}
    assert (loaded_driver.limit(0), loaded_driver.limit(1)) == (250.0, 350.0)


def test_a_stop_puts_the_former_limits_back(loaded_driver: FakeDriver, tmp_path: Path) -> None:
    """After ``put_back`` the limits are as before, and nothing is left to put back."""
    loaded_driver.put(0, "limit", 600 * WATT)
    caps = PowerCaps(opened(), FormerLimits(tmp_path / "state"))
    caps.set_caps(("GPU-0", "GPU-1"), (300.0, 300.0))
    caps.put_back()
    assert (loaded_driver.limit(0), loaded_driver.limit(1)) == (600.0, 700.0)
    assert kept(tmp_path / "state") == {}


def test_the_next_start_after_a_crash_puts_them_back(loaded_driver: FakeDriver, tmp_path: Path) -> None:
    """An actuator that was killed leaves its caps, and the next one begins with the former limits."""
    PowerCaps(opened(), FormerLimits(tmp_path / "state")).set_caps(("GPU-0",), (300.0,))
    assert loaded_driver.limit(0) == 300.0
    loaded_driver.put(0, "error", GPU_IS_LOST)
    PowerCaps(opened(), FormerLimits(tmp_path / "state"))
    loaded_driver.put(0, "error", 0)
    assert kept(tmp_path / "state") == {"GPU-0": 700.0}, "it could not be put back yet"
    PowerCaps(opened(), FormerLimits(tmp_path / "state"))
    assert (loaded_driver.limit(0), kept(tmp_path / "state")) == (700.0, {})


def test_limits_of_an_earlier_boot_are_forgotten(loaded_driver: FakeDriver, tmp_path: Path) -> None:
    """A reboot has reset all limits, so what was kept before it is not set again."""
    former = FormerLimits(tmp_path / "state", "yesterday")
    former.keep({"GPU-0": 500.0})
    PowerCaps(opened(), FormerLimits(tmp_path / "state", "today"))
    assert loaded_driver.limit(0) == 700.0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"boot_id": "x", "watts": {"GPU-0": "many"}}'])
def test_a_damaged_file_is_told_and_ignored(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that cannot be understood stops nothing."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    (folder / "former-limits.json").write_text(text)
    assert FormerLimits(folder, "x").watts == {}
    assert "damaged" in caplog.text


def test_a_gpu_that_does_not_tell_its_limit_is_not_touched(loaded_driver: FakeDriver, tmp_path: Path) -> None:
    """Without a former limit to put back, no cap is set."""
    loaded_driver.remove(0, "limit")
    PowerCaps(opened(), FormerLimits(tmp_path / "state")).set_caps(("GPU-0",), (300.0,))
    assert not (loaded_driver.folder / "0" / "limit").exists()


def test_without_gpus_nothing_happens(tmp_path: Path) -> None:
    """A host without a driver reads nothing and takes every order."""
    caps = PowerCaps(None, FormerLimits(tmp_path / "state"))
    caps.set_caps(("GPU-0",), (300.0,))
    caps.put_back()
    assert caps.read().devices == ()

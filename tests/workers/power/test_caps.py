"""Former limits outlast the actuator, however it ends."""

import errno
import json
import os
from collections.abc import Callable
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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        *(
            f'{{"boot_id": "x", "watts": {{"GPU-0": {w}}}}}'
            for w in ('"many"', "NaN", "Infinity", "-1", f"1{400 * '0'}")
        ),
    ],
)
def test_a_damaged_file_is_told_and_ignored(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that cannot be understood stops nothing."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    (folder / "former-limits.json").write_text(text)
    assert FormerLimits(folder, "x").watts == {}
    assert "damaged" in caplog.text


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Fills the disk, or makes room on it: bytes are lost when they are to be written through."""
    fsync = os.fsync

    def fill(is_full: bool) -> None:
        def fails(_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", fails if is_full else fsync)

    return fill


def test_a_gpu_whose_former_limit_finds_no_room_on_the_disk_is_not_capped(
    full_disk: Callable[[bool], None], loaded_driver: FakeDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, GPUs with a former limit on disk are capped on, and with room again it is capped as well."""
    caps = PowerCaps(opened(), FormerLimits(tmp_path / "state"))
    caps.set_caps(("GPU-0",), (300.0,))
    full_disk(True)
    for watts in (400.0, 450.0):
        caps.set_caps(("GPU-0", "GPU-1"), (watts, watts))
    assert (loaded_driver.limit(0), loaded_driver.limit(1)) == (450.0, 700.0)
    assert [record.message for record in caplog.records] == [
        "power limits cannot be written down, so their GPUs are not capped: [Errno 28] No space left on device"
    ]
    assert FormerLimits(tmp_path / "state").watts == {"GPU-0": 700.0}
    full_disk(False)
    caps.set_caps(("GPU-0", "GPU-1"), (350.0, 350.0))
    assert (loaded_driver.limit(0), loaded_driver.limit(1)) == (350.0, 350.0)


def test_all_limits_are_put_back_on_a_full_disk(
    full_disk: Callable[[bool], None], loaded_driver: FakeDriver, tmp_path: Path
) -> None:
    """At a stop and at the next start, which reads the limits that could not be taken off the disk."""
    caps = PowerCaps(opened(), FormerLimits(tmp_path / "state"))
    caps.set_caps(("GPU-0", "GPU-1"), (300.0, 300.0))
    full_disk(True)
    caps.put_back()
    assert (loaded_driver.limit(0), loaded_driver.limit(1)) == (700.0, 700.0)
    loaded_driver.put(1, "limit", 300 * WATT)
    PowerCaps(opened(), FormerLimits(tmp_path / "state"))
    assert (loaded_driver.limit(0), loaded_driver.limit(1)) == (700.0, 700.0)


def test_a_file_that_was_being_written_is_ignored(loaded_driver: FakeDriver, tmp_path: Path) -> None:
    """A crash in the middle of writing leaves the limits that were on disk before, and the next write succeeds."""
    caps = PowerCaps(opened(), FormerLimits(tmp_path / "state"))
    caps.set_caps(("GPU-0",), (300.0,))
    (tmp_path / "state" / "former-limits.new").write_text('{"boot_id": "')
    again = PowerCaps(opened(), FormerLimits(tmp_path / "state"))
    assert (loaded_driver.limit(0), kept(tmp_path / "state")) == (700.0, {})
    again.set_caps(("GPU-1",), (300.0,))
    assert kept(tmp_path / "state") == {"GPU-1": 700.0}


def test_an_operators_own_limit_is_the_highest_that_is_told(loaded_driver: FakeDriver, tmp_path: Path) -> None:
    """A limit that was lowered before the first cap stays a bound while caps are set, and after they are put back."""
    loaded_driver.put(0, "limit", 600 * WATT)
    caps = PowerCaps(opened(), FormerLimits(tmp_path / "state"))

    def told() -> list[tuple[float, float | None]]:
        return [(power.most_watts, power.cap_watts) for power in caps.read().devices]

    assert told() == [(600.0, 600.0), (700.0, 700.0)]
    caps.set_caps(("GPU-0", "GPU-1"), (300.0, 300.0))
    assert told() == [(600.0, 300.0), (700.0, 300.0)]
    caps.put_back()
    loaded_driver.put(0, "limit", 700 * WATT)
    assert told() == [(700.0, 700.0)] * 2


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


def test_a_higher_limit_of_an_operators_own_is_the_usual_one(loaded_driver: FakeDriver, tmp_path: Path) -> None:
    """Else a governor would take a device to the driver's usual limit, and leave it there."""
    loaded_driver.put(0, "usual", 600 * WATT)
    loaded_driver.put(0, "limit", 650 * WATT)
    caps = PowerCaps(opened(), FormerLimits(tmp_path / "state"))
    assert (caps.read().devices[0].usual_watts, caps.read().devices[0].most_watts) == (650.0, 650.0)
    caps.set_caps(("GPU-0",), (300.0,))
    assert (caps.read().devices[0].usual_watts, caps.read().devices[0].most_watts) == (650.0, 650.0)

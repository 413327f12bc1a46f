"""GPUs are read and capped through the real nvidia-ml-py and a fake driver, with all the ways in which one fails."""

import logging

import pynvml
import pytest

from tests.workers.power.fake_driver import GPU_IS_LOST, NO_PERMISSION, WATT, FakeDriver
from workers.power.nvml import Gpus, open_gpus


def opened(clock: list[float] | None = None) -> Gpus:
    gpus = open_gpus() if clock is None else Gpus(lambda: clock[0])
    assert isinstance(gpus, Gpus)
    return gpus


def test_every_reading_comes_from_the_driver(loaded_driver: FakeDriver) -> None:
    """Limits, constraints and the draw are the driver's, in watts, and heat is one of the throttle reasons."""
    loaded_driver.put(0, "draw", 345_678)
    loaded_driver.put(0, "reasons", pynvml.nvmlClocksThrottleReasonHwThermalSlowdown)
    loaded_driver.put(1, "reasons", pynvml.nvmlClocksThrottleReasonSwPowerCap)
    first, second = opened().read()
    assert (first.device, first.least_watts, first.most_watts, first.usual_watts) == ("GPU-0", 200.0, 700.0, 700.0)
    assert (first.cap_watts, first.enforced_watts, first.draw_watts) == (700.0, 700.0, 345.678)
    assert (first.is_throttled, second.is_throttled) == (True, False), "a power cap is not heat"


def test_what_the_driver_does_not_tell_is_unknown(loaded_driver: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    """A draw that is not told is None, and a GPU without limits is left alone, with one line in the log."""
    loaded_driver.remove(0, "draw")
    loaded_driver.remove(1, "least")
    gpus = opened()
    for _ in range(3):
        [power] = gpus.read()
    assert (power.device, power.draw_watts) == ("GPU-0", None)
    assert [record.message for record in caplog.records] == [
        "GPU GPU-1 has no power limit that can be read, and is left alone"
    ]


def test_a_cap_is_set_and_read_back(loaded_driver: FakeDriver) -> None:
    """A cap is the driver's limit afterwards, and an enforced limit below it is read as such."""
    loaded_driver.put(0, "enforced_most", 300 * WATT)
    gpus = opened()
    assert gpus.set_cap("GPU-0", 350.0)
    power = gpus.read()[0]
    assert (loaded_driver.limit(0), power.cap_watts, power.enforced_watts) == (350.0, 350.0, 300.0)


def test_a_denied_permission_is_reported_once(loaded_driver: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    """Without permission the limit stays, the reading says that it cannot be set, and the log has one line."""
    loaded_driver.put(0, "set_error", NO_PERMISSION)
    gpus = opened()
    assert not any(gpus.set_cap("GPU-0", 350.0) for _ in range(3))
    assert [power.can_set for power in gpus.read()] == [False, True]
    assert (loaded_driver.limit(0), len(caplog.records)) == (700.0, 1)
    assert "Insufficient Permissions" in caplog.records[0].message


def test_a_cap_outside_of_constraints_is_refused(loaded_driver: FakeDriver) -> None:
    """The driver refuses it, and the GPU can still be set."""
    gpus = opened()
    assert not gpus.set_cap("GPU-0", 100.0)
    assert gpus.read()[0].can_set
    assert gpus.set_cap("GPU-0", 200.0)


def test_a_gpu_that_falls_off_the_bus_is_left_out_and_comes_back(
    loaded_driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are read on, and the lost one is found again half a minute after it answers."""
    clock = [0.0]
    gpus = opened(clock)
    loaded_driver.put(0, "error", GPU_IS_LOST)
    assert [power.device for power in gpus.read()] == ["GPU-1"]
    assert not gpus.set_cap("GPU-0", 300.0)
    clock[0] = 40.0
    assert [power.device for power in gpus.read()] == ["GPU-1"]
    loaded_driver.put(0, "error", 0)
    clock[0] = 80.0
    assert [power.device for power in gpus.read()] == ["GPU-1", "GPU-0"]
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_without_a_driver_the_reason_is_told(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that does not start gives its reason in one line."""
    fake_driver.put(None, "init_error", pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    fake_driver.load(monkeypatch)
    assert isinstance(open_gpus(), str)


def test_a_gpu_that_fails_for_a_moment_counts_at_its_last_cap(loaded_driver: FakeDriver) -> None:
    """After an unknown error it may still draw what its cap allows, so it is told as one that cannot be read or set."""
    gpus = opened()
    assert gpus.set_cap("GPU-0", 350.0)
    before = gpus.read()[0]
    loaded_driver.put(0, "error", pynvml.NVML_ERROR_UNKNOWN)
    failing = gpus.read()[0]
    assert (failing.cap_watts, failing.draw_watts, failing.can_set) == (350.0, None, False)
    loaded_driver.put(0, "error", 0)
    assert gpus.read()[0] == before


def test_a_driver_that_cannot_count_its_gpus_ends_nothing(
    loaded_driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """The search for more GPUs fails with one line in the log, and those that are known are read on."""
    clock = [0.0]
    gpus = opened(clock)
    (loaded_driver.folder / "count").unlink()
    for now in (40.0, 80.0):
        clock[0] = now
        assert len(gpus.read()) == 2
    assert [record.message for record in caplog.records] == ["GPU of this host cannot be counted: Not Supported"]


def test_a_former_limit_beyond_the_constraints_is_put_back_as_far_as_they_allow(loaded_driver: FakeDriver) -> None:
    """A driver may tell a limit that it would not take, and then the nearest one is set."""
    gpus = opened()
    assert gpus.set_cap("GPU-0", 300.0)
    assert gpus.put_back("GPU-0", 750.0)
    assert loaded_driver.limit(0) == 700.0
    assert gpus.put_back("GPU-0", 100.0)
    assert loaded_driver.limit(0) == 200.0
    assert not gpus.put_back("GPU-9", 300.0)

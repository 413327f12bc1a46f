"""What a worker computes on tells its power, and nothing is made up."""

from pathlib import Path

import pynvml
import pytest

from actorserve.core.messages import PowerReading
from tests.workers.power.fake_driver import GPU_IS_LOST, FakeDriver
from tests.workers.power.rapl_files import package
from workers.power.rapl import Rapl
from workers.power.sensor import GpuSensor, open_sensor


def test_a_gpu_tells_all_that_its_driver_knows(loaded_driver: FakeDriver) -> None:
    """The reading names the GPU, and has its power, its cap, temperature, clock, free memory and heat."""
    for name, value in (("temperature", 71), ("clock", 1410), ("memory_total", 80 * 2**30), ("memory_free", 2**30)):
        loaded_driver.put(1, name, value)
    loaded_driver.put(1, "reasons", pynvml.nvmlClocksThrottleReasonSwThermalSlowdown)
    sensor = open_sensor("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-1"})
    assert isinstance(sensor, GpuSensor)
    reading = sensor.read()
    assert reading is not None
    assert (reading.device, reading.draw_watts, reading.energy_j) == ("GPU-1", 100.0, None)
    assert (reading.temperature_c, reading.clock_mhz, reading.memory_free_bytes) == (71.0, 1410.0, 2**30)
    assert reading.is_throttled
    assert reading.cap_watts == 700.0
    loaded_driver.put(1, "error", GPU_IS_LOST)
    assert sensor.read() == PowerReading("GPU-1"), "nothing is known of it but its name"


@pytest.mark.parametrize(
    ("counts", "joules"),
    [((5_000, 7_500, 9_000), 4.0), ((2**32 - 1_000, 500, 1_500), 2.5), ((2**40, 2_000, 3_000), 3.0)],
)
def test_energy_goes_on_when_its_counter_wraps_or_begins_again(
    counts: tuple[int, ...], joules: float, loaded_driver: FakeDriver
) -> None:
    """The energy counts from the first reading, and a counter that fell has wrapped at 32 bits or begun again."""
    sensor = open_sensor("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-0"})
    assert sensor is not None
    for count in counts:
        loaded_driver.put(0, "energy", count)
        reading = sensor.read()
    assert reading is not None
    assert reading.energy_j == pytest.approx(joules)


def test_a_slice_is_a_part_of_its_gpu(loaded_driver: FakeDriver) -> None:
    """The reading of a MIG slice has the name and the cap of its GPU and its own memory, but no power of its own."""
    for device in (1, "1-mig"):
        for name, size in (("memory_total", 80 * 2**30), ("memory_free", 2**30), ("energy", 5_000)):
            loaded_driver.put(device, name, size if device == 1 else size // 8)
    sensor = open_sensor("cuda", {"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert sensor is not None
    reading = sensor.read()
    assert reading is not None
    assert (sensor.device, reading.device, reading.cap_watts) == ("GPU-1", "GPU-1", 700.0)
    assert (reading.draw_watts, reading.energy_j) == (None, None)
    assert reading.memory_free_bytes == 2**27
    loaded_driver.put(1, "error", GPU_IS_LOST)
    assert sensor.read() == PowerReading("GPU-1"), "nothing is known of it but its name"


def test_processes_of_a_gpu_count_its_energy_once(loaded_driver: FakeDriver) -> None:
    """A process counts all while it is alone, and half while there are two, or were just now. While nothing tells how
    many there are, its part is not known, and comes with the next reading.
    """
    sensor = open_sensor("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-0"})
    assert sensor is not None

    def read(processes: int | None, energy_mj: int) -> tuple[float | None, float | None]:
        loaded_driver.put(0, "energy", energy_mj)
        if processes is None:
            loaded_driver.remove(0, "processes")
        else:
            loaded_driver.put(0, "processes", processes)
        reading = sensor.read()
        assert reading is not None
        return reading.draw_watts, reading.energy_j

    assert read(1, 0) == (100.0, 0.0)
    assert read(1, 4_000) == (100.0, 4.0)
    assert read(2, 10_000) == (50.0, 7.0)
    assert read(None, 12_000) == (None, None)
    assert read(2, 14_000) == (50.0, 9.0)
    assert read(0, 15_000) == (100.0, 9.5), "the other process may have counted until it ended"
    assert read(1, 17_000) == (100.0, 11.5)


@pytest.mark.parametrize("name", ["", "0", "GPU-x", "GPU-0,GPU-1", "MIG-1"])
def test_without_a_gpu_of_its_name_there_is_no_sensor(name: str, loaded_driver: FakeDriver) -> None:
    """A worker whose GPU the driver does not know by name reads nothing."""
    assert open_sensor("cuda", {"CUDA_VISIBLE_DEVICES": name}) is None


def test_a_cpu_worker_tells_its_part_of_the_packages(tmp_path: Path) -> None:
    """A CPU worker's reading is its part of the host's packages, and it names no device."""
    now, cpu_s = [0.0], [0.0]
    package(tmp_path, "intel-rapl:0", 0)
    sensor = open_sensor("cpu", {}, lambda: Rapl(tmp_path, lambda: now[0], lambda: cpu_s[0], 4))
    assert sensor is not None
    assert sensor.read() is None
    package(tmp_path, "intel-rapl:0", 600_000)
    now[0], cpu_s[0] = 2.0, 4.0  # half of what 4 CPUs have in 2 s
    reading = sensor.read()
    assert reading is not None
    assert reading.device == ""
    assert reading.draw_watts == pytest.approx(0.15)
    assert reading.energy_j == pytest.approx(0.3)

"""The power of what a worker computes on, for its load reports: its GPU by NVML, or the host's CPUs by RAPL."""

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import pynvml

from actorserve.core.messages import PowerReading
from workers.power.nvml import HEAT, Gpu, GpuGoneError
from workers.power.rapl import Rapl

_MILLI: Final = 1000.0
_WRAP: Final = 2**32


class PowerSensor(Protocol):
    """Reads the power. Call it on one thread; it may take some milliseconds.

    ``device`` is the name in its readings: the driver's name of the GPU; empty for CPUs.
    """

    device: str

    def read(self) -> PowerReading | None:
        """The power now; None if nothing tells any."""
        ...


class GpuSensor:
    """One GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.device = gpu.device
        self._gpu = gpu
        self._last_mj: int | None = None
        self._energy_mj = 0

    def read(self) -> PowerReading | None:
        try:
            return self._read()
        except GpuGoneError:
            return None

    def _read(self) -> PowerReading:
        gpu = self._gpu
        reasons = gpu.ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        memory = gpu.ask(pynvml.nvmlDeviceGetMemoryInfo)
        return PowerReading(
            gpu.device,
            gpu.watts(pynvml.nvmlDeviceGetPowerUsage),
            self._energy_j(),
            _float(gpu.ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)),
            _float(gpu.ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM)),
            None if memory is None else int(memory.free),
            is_throttled=reasons is not None and bool(reasons & HEAT),
            cap_watts=gpu.watts(pynvml.nvmlDeviceGetPowerManagementLimit),
        )

    def _energy_j(self) -> float | None:
        """The energy since the first reading. A counter that falls has wrapped at 32 bits, or begun again with its
        driver.
        """
        now_mj = self._gpu.ask(pynvml.nvmlDeviceGetTotalEnergyConsumption)
        if now_mj is None:
            return None
        last_mj = now_mj if self._last_mj is None else self._last_mj
        if now_mj < last_mj:
            last_mj = last_mj - _WRAP if _WRAP // 2 <= last_mj < _WRAP else 0
        self._energy_mj += now_mj - last_mj
        self._last_mj = now_mj
        return self._energy_mj / _MILLI


class CpuSensor:
    """The CPU packages of the host."""

    def __init__(self, rapl: Rapl) -> None:
        self.device = ""
        self._rapl = rapl

    def read(self) -> PowerReading | None:
        watts = self._rapl.watts()
        return None if watts is None else PowerReading("", watts, self._rapl.energy_j)


def open_sensor(
    device: str, environment: Mapping[str, str], make_rapl: Callable[[], Rapl] = Rapl
) -> PowerSensor | None:
    """The sensor of a worker on ``device`` (cpu or cuda), whose GPU's UUID is in CUDA_VISIBLE_DEVICES. None if there is
    no driver, or the GPU has no such name.
    """
    if device != "cuda":
        return CpuSensor(make_rapl())
    name = environment.get("CUDA_VISIBLE_DEVICES", "")
    if not name.startswith("GPU-") or "," in name:
        return None
    try:
        pynvml.nvmlInit()
        handle: Any = pynvml.nvmlDeviceGetHandleByUUID(name)
    except pynvml.NVMLError:
        return None
    return GpuSensor(Gpu(name, handle))


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)

"""The power of what a worker computes on, for its load reports: its GPU by NVML, or the host's CPUs by RAPL."""

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import pynvml

from actorserve.core.messages import PowerReading
from workers.power.nvml import HEAT, Gpu, GpuGoneError, uuid_of
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
    """One GPU, or a MIG slice of it. The reading names the GPU in both cases, because caps are the GPU's.

    - The driver measures the power and energy of a whole GPU. Processes that compute on it count equal parts of both,
      so that the sum over all of its workers is never more than what the GPU takes. If the driver does not tell how
      many there are, this process's part is not known. A driver that tells none hides them from this process, as in a
      container: then this process counts all.
    - The part of a slice is not known, because slices differ in size.
    """

    def __init__(self, gpu: Gpu, mig_slice: Gpu | None = None) -> None:
        self.device = gpu.device
        self._gpu = gpu
        self._slice = mig_slice
        self._last_mj: int | None = None
        self._last_part = 1.0
        self._energy_mj = 0.0

    def read(self) -> PowerReading:
        try:
            return self._read()
        except GpuGoneError:
            return PowerReading(self.device)

    def _read(self) -> PowerReading:
        gpu = self._gpu
        reasons = gpu.ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        memory = (self._slice or gpu).ask(pynvml.nvmlDeviceGetMemoryInfo)
        watts, part = gpu.watts(pynvml.nvmlDeviceGetPowerUsage), self._part()
        return PowerReading(
            gpu.device,
            None if watts is None or part is None else watts * part,
            None if part is None else self._energy_j(part),
            _float(gpu.ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)),
            _float(gpu.ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM)),
            None if memory is None else int(memory.free),
            is_throttled=reasons is not None and bool(reasons & HEAT),
            cap_watts=gpu.watts(pynvml.nvmlDeviceGetPowerManagementLimit),
        )

    def _part(self) -> float | None:
        """What this process counts of the GPU's power; None if that is not known."""
        if self._slice is not None:
            return None
        # Without its number, an old driver's lack of this function would not be an NVMLError.
        processes = self._gpu.ask(pynvml.nvmlDeviceGetComputeRunningProcesses_v3)
        return None if processes is None else 1.0 / max(1, len(processes))

    def _energy_j(self, part: float) -> float | None:
        """The energy since the first reading. Since the last one this process counts ``part``, or its part then if that
        is less, because another process may have ended meanwhile and counted its own. A counter that falls has wrapped
        at 32 bits, or begun again with its driver.
        """
        now_mj = self._gpu.ask(pynvml.nvmlDeviceGetTotalEnergyConsumption)
        if now_mj is None:
            return None
        last_mj = now_mj if self._last_mj is None else self._last_mj
        if now_mj < last_mj:
            last_mj = last_mj - _WRAP if _WRAP // 2 <= last_mj < _WRAP else 0
        self._energy_mj += (now_mj - last_mj) * min(part, self._last_part)
        self._last_mj, self._last_part = now_mj, part
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
    """The sensor of a worker on ``device`` (cpu or cuda). The UUID of its GPU, or of its MIG slice, is in
    CUDA_VISIBLE_DEVICES. None if there is no driver, or if the driver does not know that name.
    """
    if device != "cuda":
        return CpuSensor(make_rapl())
    name = environment.get("CUDA_VISIBLE_DEVICES", "")
    if not name.startswith(("GPU-", "MIG-")) or "," in name:
        return None
    try:
        pynvml.nvmlInit()
        handle: Any = pynvml.nvmlDeviceGetHandleByUUID(name)
        if name.startswith("GPU-"):
            return GpuSensor(Gpu(name, handle))
        parent: Any = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        return GpuSensor(Gpu(uuid_of(parent), parent), Gpu(name, handle))
    except pynvml.NVMLError:
        return None


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)

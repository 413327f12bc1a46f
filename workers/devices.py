"""The GPUs that this machine lets us use, from the driver, without loading torch: ``python -m workers.devices``.

It runs as a process of its own, so that the supervisor needs neither torch nor a driver. It respects
``CUDA_VISIBLE_DEVICES``.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import pynvml

from actorserve.errors import ActorserveError

_NO_DRIVER = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_NOT_FOUND)


class DriverError(ActorserveError):
    """The NVIDIA driver is there, but cannot tell its GPUs."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU; ``selector`` is what ``CUDA_VISIBLE_DEVICES`` takes to choose it alone."""

    selector: str
    name: str
    memory_bytes: int


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def driver_devices() -> list[Device]:
    """Every GPU that the driver knows, in its order; none if there is no driver.

    Selectors are UUIDs: the driver's order and CUDA's own order may differ.

    Raises: DriverError if there is a driver that fails, because a machine with GPUs would otherwise serve on its CPU.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value in _NO_DRIVER:
            return []
        raise DriverError(f"the NVIDIA driver answers: {error}") from None
    try:
        devices = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            devices.append(
                Device(
                    selector=_text(pynvml.nvmlDeviceGetUUID(handle)),
                    name=_text(pynvml.nvmlDeviceGetName(handle)),
                    memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                )
            )
        return devices
    except pynvml.NVMLError as error:
        raise DriverError(f"the NVIDIA driver answers: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def driver_cuda_version() -> tuple[int, int] | None:
    """The newest version of CUDA that the driver runs, (major, minor); None if there is no driver that tells."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        number = pynvml.nvmlSystemGetCudaDriverVersion_v2()  # 1000 * major + 10 * minor
        return number // 1000, number % 1000 // 10
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def visible(devices: list[Device], cuda_visible_devices: str | None) -> list[Device]:
    """The devices that CUDA would show. Like CUDA, stop at the first entry that names no device.

    Entries are indices, UUIDs or beginnings of UUIDs.
    """
    if cuda_visible_devices is None:
        return devices
    chosen: list[Device] = []
    for entry in filter(None, (part.strip() for part in cuda_visible_devices.split(","))):
        if entry.isdecimal():
            matching = devices[int(entry) : int(entry) + 1]
        elif entry.startswith("MIG-") and devices:  # a slice of a GPU, which the driver does not list
            matching = [Device(selector=entry, name="MIG slice", memory_bytes=0)]
        else:
            matching = [device for device in devices if device.selector.startswith(entry)]
        if len(matching) != 1 or matching[0] in chosen:
            break
        chosen.append(matching[0])
    return chosen


def usable_devices(environment: Mapping[str, str] = os.environ) -> list[Device]:
    """The GPUs that workers started with this environment may use. Raises: DriverError."""
    return visible(driver_devices(), environment.get("CUDA_VISIBLE_DEVICES"))


if __name__ == "__main__":
    try:
        json.dump([asdict(device) for device in usable_devices()], sys.stdout)
    except DriverError as problem:
        sys.exit(str(problem))

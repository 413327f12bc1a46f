"""The GPUs' power by NVML. What the driver does not tell is None, and each problem is logged once.

Importing this module needs no driver; ``open_gpus`` finds out whether there is one.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pynvml

from actorserve.core.messages import DevicePower

_RESCAN_S: Final = 30.0  # a GPU that fell off the bus may come back
_MILLI: Final = 1000.0
HEAT: Final = pynvml.nvmlClocksThrottleReasonHwThermalSlowdown | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
_GONE: Final = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT)
_NEVER: Final = (pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_NOT_SUPPORTED)
_log: Final = logging.getLogger("actorserve.power")


class GpuGoneError(Exception):
    """A GPU answers no more."""


class Gpu:
    """One GPU. ``device`` is its UUID."""

    def __init__(self, device: str, handle: Any) -> None:
        self.device = device
        self.handle = handle
        self.cannot_be_set = ""  # why its power limit cannot be set; empty if it can, as far as is known
        self._last: DevicePower | None = None

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What NVML answers; None if this GPU does not tell that. Raises: GpuGoneError."""
        try:
            return function(self.handle, *arguments)
        except pynvml.NVMLError as error:
            if error.value in _GONE:
                raise GpuGoneError(str(error)) from None
            return None

    def watts(self, function: Callable[..., Any]) -> float | None:
        """An answer in milliwatts, as watts. Raises: GpuGoneError."""
        answer = self.ask(function)
        return None if answer is None else answer / _MILLI

    def read(self) -> DevicePower | None:
        """Its power now; None if its power limit cannot be read at all. Raises: GpuGoneError.

        While a GPU that told its limits does not tell them, it may still draw as much as its last cap allows.
        """
        draw = self.watts(pynvml.nvmlDeviceGetPowerUsage)
        cap = self.watts(pynvml.nvmlDeviceGetPowerManagementLimit)
        bounds = self.ask(pynvml.nvmlDeviceGetPowerManagementLimitConstraints)
        usual = self.watts(pynvml.nvmlDeviceGetPowerManagementDefaultLimit)
        if bounds is None or (usual is None and cap is None):
            return self._last and replace(
                self._last, enforced_watts=None, draw_watts=None, is_throttled=False, can_set=False
            )
        least, most = (bound / _MILLI for bound in bounds)
        reasons = self.ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        self._last = DevicePower(
            self.device,
            least,
            most,
            most if usual is None else usual,
            cap,
            self.watts(pynvml.nvmlDeviceGetEnforcedPowerLimit),
            draw,
            is_throttled=reasons is not None and bool(reasons & HEAT),
            can_set=not self.cannot_be_set,
        )
        return self._last

    def bounds_watts(self) -> tuple[float, float] | None:
        """The least and the highest power limit that its driver allows; None if it does not tell."""
        try:
            least, most = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(self.handle)
        except pynvml.NVMLError:
            return None
        return least / _MILLI, most / _MILLI

    def set_cap(self, watts: float) -> str:
        """Set its power limit. Returns why that failed; empty if it did not."""
        try:
            pynvml.nvmlDeviceSetPowerManagementLimit(self.handle, round(watts * _MILLI))
        except pynvml.NVMLError as error:
            if error.value in _NEVER:
                self.cannot_be_set = str(error)
            return str(error)
        return ""


class Gpus:
    """All GPUs that the driver knows."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._gpus: dict[str, Gpu] = {}
        self._said: set[tuple[str, str]] = set()
        self._next_scan_s = clock() + _RESCAN_S
        self._scan()

    def __iter__(self) -> Any:
        return iter(list(self._gpus.values()))

    def read(self) -> tuple[DevicePower, ...]:
        """What every GPU tells that answers."""
        if self._clock() >= self._next_scan_s:
            self._next_scan_s = self._clock() + _RESCAN_S
            try:
                self._scan()
            except pynvml.NVMLError as error:
                self._say("of this host", f"cannot be counted: {error}")
        found = []
        for gpu in list(self._gpus.values()):
            try:
                power = gpu.read()
            except GpuGoneError as error:
                self._say(gpu.device, f"answers no more: {error}")
                del self._gpus[gpu.device]
                continue
            if power is None:
                self._say(gpu.device, "has no power limit that can be read, and is left alone")
            else:
                found.append(power)
        return tuple(found)

    def set_cap(self, device: str, watts: float) -> bool:
        """Set a GPU's power limit. False, with a line in the log the first time, if that failed."""
        gpu = self._gpus.get(device)
        why = "is not there" if gpu is None else gpu.set_cap(watts)
        if why:
            self._say(device, f"its power limit cannot be set: {why}")
        return not why

    def put_back(self, device: str, watts: float) -> bool:
        """Give a GPU the power limit that it had, or the nearest one that its driver allows now. False as above."""
        gpu = self._gpus.get(device)
        bounds = None if gpu is None else gpu.bounds_watts()
        return self.set_cap(device, watts if bounds is None else min(bounds[1], max(bounds[0], watts)))

    def close(self) -> None:
        pynvml.nvmlShutdown()

    def _say(self, device: str, what: str) -> None:
        if (device, what) not in self._said:
            self._said.add((device, what))
            _log.warning("GPU %s %s", device, what)

    def _scan(self) -> None:
        """Find GPUs that are not known yet. Raises: NVMLError if the driver does not tell how many there are."""
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                device = uuid_of(handle)
            except pynvml.NVMLError as error:
                self._say(f"number {index}", f"cannot be read: {error}")
                continue
            if device not in self._gpus:
                self._gpus[device] = Gpu(device, handle)
                self._said = {said for said in self._said if said[0] != device}


def uuid_of(handle: Any) -> str:
    """Raises: NVMLError."""
    uuid: str | bytes = pynvml.nvmlDeviceGetUUID(handle)
    return uuid.decode() if isinstance(uuid, bytes) else uuid


def open_gpus() -> Gpus | str:
    """The GPUs, or in one line why none can be read."""
    try:
        pynvml.nvmlInit()
        return Gpus()
    except pynvml.NVMLError as error:
        return str(error)

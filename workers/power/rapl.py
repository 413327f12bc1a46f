"""The power of the host's CPU packages by RAPL, where the kernel lets this process read it (/sys/class/powercap)."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

POWERCAP: Final = Path("/sys/class/powercap")
_PACKAGE: Final = "package"  # how the names of packages begin; "psys" is the whole machine, packages included
_LEAST_S: Final = 0.05  # counters change about once a millisecond


class Rapl:
    """Sums the energy counters of all packages. They wrap at a range that the kernel tells.

    The processes of a host share its packages. This process counts the part of their energy that its CPU time is of the
    time of all CPUs, idle or not, because then the sum over all processes is never more than the packages' energy.
    """

    def __init__(
        self,
        folder: Path = POWERCAP,
        clock: Callable[[], float] = time.monotonic,
        cpu_time_s: Callable[[], float] = time.process_time,
        num_cpus: int | None = None,
    ) -> None:
        """``cpu_time_s`` is this process's CPU time, and ``num_cpus`` the number of the host's CPUs."""
        self._clock = clock
        self._cpu_time_s = cpu_time_s
        self._num_cpus = num_cpus or os.cpu_count() or 1
        # A package's parts (cores, memory) have other names, and are counted with it.
        self._packages = [
            path for path in sorted(folder.glob("intel-rapl:*")) if _text(path / "name").startswith(_PACKAGE)
        ]
        self._last: dict[Path, int] = {}
        self._last_s = 0.0
        self._last_cpu_s = 0.0
        self._watts: float | None = None
        self.energy_j = 0.0
        """This process's part of the energy since this object was made, as far as it was read."""

    def watts(self) -> float | None:
        """This process's mean power since the call before; None at the first call, without packages, and if a package
        does not tell its energy.
        """
        now = self._clock()
        if self._last and now < self._last_s + _LEAST_S:
            return self._watts
        read = {package: _integer(package / "energy_uj") for package in self._packages}
        counts = {package: count for package, count in read.items() if count is not None}
        if not counts or len(counts) < len(read):
            return None
        cpu_s = self._cpu_time_s()
        watts = None
        if self._last:
            period_s = now - self._last_s
            share = min(1.0, (cpu_s - self._last_cpu_s) / (period_s * self._num_cpus))
            joules = sum(self._since(package, count) for package, count in counts.items()) / 1e6 * share
            self.energy_j += joules
            watts = joules / period_s
        self._last, self._last_s, self._last_cpu_s, self._watts = counts, now, cpu_s, watts
        return watts

    def _since(self, package: Path, count: int) -> int:
        """Microjoules since the last reading."""
        grown = count - self._last.get(package, count)
        return grown if grown >= 0 else grown + (_integer(package / "max_energy_range_uj") or -grown)


def _text(file: Path) -> str:
    """Empty if it cannot be read."""
    try:
        return file.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


def _integer(file: Path) -> int | None:
    try:
        return int(_text(file))
    except ValueError:
        return None

"""The power of the host's CPU packages by RAPL, where the kernel lets this process read it (/sys/class/powercap)."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

POWERCAP: Final = Path("/sys/class/powercap")
_LEAST_S: Final = 0.05  # counters change about once a millisecond


class Rapl:
    """Sums the energy counters of all packages. They wrap at a range that the kernel tells."""

    def __init__(self, folder: Path = POWERCAP, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # A name with one colon is a package; its parts (cores, memory) have two, and are counted with it.
        self._packages = [path for path in sorted(folder.glob("intel-rapl:*")) if path.name.count(":") == 1]
        self._last: dict[Path, int] = {}
        self._last_s = 0.0
        self._watts: float | None = None
        self.energy_j = 0.0
        """The energy since this object was made, as far as it was read."""

    def watts(self) -> float | None:
        """The mean power since the call before; None if a package does not tell, or at the first call."""
        now = self._clock()
        if self._last and now < self._last_s + _LEAST_S:
            return self._watts
        read = {package: _integer(package / "energy_uj") for package in self._packages}
        counts = {package: count for package, count in read.items() if count is not None}
        if not counts or len(counts) < len(read):
            return None
        watts = None
        if self._last:
            joules = sum(self._since(package, count) for package, count in counts.items()) / 1e6
            self.energy_j += joules
            watts = joules / (now - self._last_s)
        self._last, self._last_s, self._watts = counts, now, watts
        return watts

    def _since(self, package: Path, count: int) -> int:
        """Microjoules since the last reading."""
        grown = count - self._last.get(package, count)
        return grown if grown >= 0 else grown + (_integer(package / "max_energy_range_uj") or -grown)


def _integer(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None

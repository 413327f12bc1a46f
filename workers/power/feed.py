"""The power of the whole host, by the meter of its power supply, where the kernel has one (/sys/class/hwmon)."""

from pathlib import Path
from typing import Final

HWMON: Final = Path("/sys/class/hwmon")
_METER: Final = "power_meter"  # the kernel's driver of ACPI's power meter, which measures the machine's input
_MICRO: Final = 1e6


class FeedMeter:
    """Sums the meters of the host's power supplies."""

    def __init__(self, folder: Path = HWMON) -> None:
        self._meters = [path for path in sorted(folder.glob("hwmon*")) if _text(path / "name") == _METER]

    def watts(self) -> float | None:
        """The power now; None without a meter, or if one does not tell."""
        watts = [_watts(meter / "power1_average") for meter in self._meters]
        known = [each for each in watts if each is not None]
        return sum(known) if known and len(known) == len(watts) else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _watts(file: Path) -> float | None:
    try:
        return int(_text(file)) / _MICRO
    except ValueError:
        return None

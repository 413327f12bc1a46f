"""The power limits that devices had before the actuator set the first one, kept on disk until they are put back.

They are written before a limit is set, so that an actuator that was killed finds them at its next start. A reboot
resets all limits, so limits of an earlier boot are forgotten.
"""

import json
import logging
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from actorserve.local_trust import open_plain, trusted_folder

_FILE: Final = "former-limits.json"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_log: Final = logging.getLogger("actorserve.power")


class FormerLimits:
    """Device -> watts. Raises: UntrustedError if others could change ``folder``; OSError if it cannot be used."""

    def __init__(self, folder: Path, boot_id: str | None = None) -> None:
        self._file = trusted_folder(folder) / _FILE
        self._boot_id = _this_boot() if boot_id is None else boot_id
        self.watts: dict[str, float] = self._read()

    def keep(self, limits: dict[str, float]) -> None:
        """Keep the limits of devices that have none here yet. They are on disk afterwards. Raises: OSError."""
        new = {device: watts for device, watts in limits.items() if device not in self.watts}
        if new:
            self._write(self.watts | new)

    def forget(self, devices: Collection[str]) -> None:
        """These devices have their former limits again. Raises: OSError."""
        if devices:
            self._write({device: watts for device, watts in self.watts.items() if device not in devices})

    def _read(self) -> dict[str, float]:
        try:
            with open_plain(self._file) as file:
                kept = json.loads(file.read())
            if kept["boot_id"] != self._boot_id:
                return {}
            return {str(device): _watts(watts) for device, watts in kept["watts"].items()}
        except FileNotFoundError:
            return {}
        except (ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
            _log.warning("%s is damaged, so former power limits are not known: %r", self._file, error)
            return {}

    def _write(self, watts: dict[str, float]) -> None:
        unfinished = self._file.with_suffix(".new")
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump({"boot_id": self._boot_id, "watts": watts}, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self._file)
        folder = os.open(self._file.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self.watts = watts


def _watts(value: Any) -> float:
    """Raises: TypeError or ValueError for what is no power limit."""
    watts = float(value)
    if not 0.0 < watts < math.inf:
        raise ValueError(f"a power limit of {watts} W")
    return watts


def _this_boot() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""

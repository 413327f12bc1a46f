"""What was refused because of keys: counted, and logged in one line."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

_FORGET_AFTER_S: Final = 3600.0
_LINES_PER_PERIOD: Final = 20
_PERIOD_S: Final = 60.0

_log: Final = logging.getLogger("actorserve.wire")


class Refusals:
    """Counts refusals, and logs one line an hour for each key and reason, but at most 20 lines a minute."""

    def __init__(self, name: str, counts: Counter[str], clock: Callable[[], float]) -> None:
        self._name = name
        self._counts = counts
        self._clock = clock
        self._logged: set[tuple[str, str]] = set()
        self._forget_at = float("-inf")
        self._lines_left = 0
        self._refill_at = float("-inf")
        self._on_line: Callable[[str], None] | None = None

    def on_line(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with each line that is logged."""
        self._on_line = callback

    def refuse(self, reason: str, key: str, what: str) -> None:
        """Refuse ``what``, which came with the public key ``key`` (empty: none is known). Reasons are few."""
        self._counts[f"refused: {reason}"] += 1
        now = self._clock()
        if now >= self._forget_at:
            self._logged.clear()
            self._forget_at = now + _FORGET_AFTER_S
        if (reason, key) in self._logged:
            return
        if now >= self._refill_at:
            self._lines_left, self._refill_at = _LINES_PER_PERIOD, now + _PERIOD_S
        if self._lines_left > 0:
            self._lines_left -= 1
            self._logged.add((reason, key))
            text = f"refused {what}: {reason}{key and f' ({key})'}"
            _log.warning("%s: %s", self._name, text)
            if self._on_line is not None:
                self._on_line(text)

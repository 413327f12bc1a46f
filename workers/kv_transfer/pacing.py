"""A token bucket: so many bytes a second through one link, with bursts."""

import threading
import time
from collections.abc import Callable

_BURST_S = 0.02  # of the rate: what may go at once after a pause
_DEBT_S = 1.0  # of the rate: what was urgent is waited off for no longer


class TokenBucket:
    """Holds back whoever would take more than ``bytes_per_s``; None holds nobody back. For any number of threads.

    ``clock`` and ``sleep`` are in seconds.
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._burst_bytes = 0.0 if bytes_per_s is None else _BURST_S * bytes_per_s
        self._level_bytes = self._burst_bytes
        self._at_s = clock()

    def take(self, num_bytes: int, *, is_urgent: bool = False) -> None:
        """Return when so many bytes may go. ``is_urgent``: at once, and later takers wait for it, a second at most."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = self._clock()
            self._level_bytes = min(self._burst_bytes, self._level_bytes + (now - self._at_s) * self._bytes_per_s)
            self._at_s = now
            self._level_bytes -= num_bytes
            if is_urgent:
                self._level_bytes = max(self._level_bytes, -_DEBT_S * self._bytes_per_s)
            wait_s = -self._level_bytes / self._bytes_per_s
        if wait_s > 0 and not is_urgent:
            self._sleep(wait_s)

"""A token bucket: bounds the bytes a second through one link, and allows bursts."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

LEAST_BYTES_PER_S = 2**22
"""A read from a slower source fails."""

_BURST_S = 0.02  # after a pause this many seconds' worth of bytes may go at once
_DEBT_S = 1.0  # urgent bytes make later callers wait at most this long


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast one worker's KV may be read; None for no bound. ``clock`` and ``sleep`` are in seconds."""

    bytes_per_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


UNBOUNDED = Rate()


class TokenBucket:
    """Makes callers wait if together they would exceed the rate. Any number of threads may call it."""

    def __init__(self, rate: Rate) -> None:
        self._bytes_per_s, self._clock, self._sleep = rate.bytes_per_s, rate.clock, rate.sleep
        self._lock = threading.Lock()
        self._burst_bytes = 0.0 if rate.bytes_per_s is None else _BURST_S * rate.bytes_per_s
        self._level_bytes = self._burst_bytes
        self._at_s = rate.clock()

    def take(self, num_bytes: int, *, is_urgent: bool = False) -> None:
        """Return when ``num_bytes`` may be copied. Urgent bytes go at once, and later callers pay by waiting, a
        second at most.
        """
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

"""The restarts of a child that fails: with backoff, and limited in number. Pure; ``supervisor_state`` uses it."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the child again in ``after_s``."""

    after_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The child has failed ``num_failures`` times within the window, so another restart would not help."""

    num_failures: int


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """At most ``max_restarts`` restarts within ``window_s`` (OTP's intensity and period).

    The k-th restart waits ``backoff_s * 2**(k-1)``, and at most ``max_backoff_s``.
    """

    max_restarts: int = 5
    window_s: float = 60.0
    backoff_s: float = 0.05
    max_backoff_s: float = 10.0


class RestartPolicy:
    """The decisions for one child. A failure older than the window no longer counts, also not for the backoff."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._failed_at: deque[float] = deque()

    def failed(self, now: float) -> Restart | GiveUp:
        """Decide about a child that has failed at ``now``. Times must not decrease."""
        self._failed_at.append(now)
        while self._failed_at[0] <= now - self._limits.window_s:
            self._failed_at.popleft()
        num_failures = len(self._failed_at)
        if num_failures > self._limits.max_restarts:
            return GiveUp(num_failures)
        # The exponent is bounded so that a large ``max_restarts`` cannot overflow a float.
        backoff_s = self._limits.backoff_s * 2.0 ** min(num_failures - 1, 64)
        return Restart(min(backoff_s, self._limits.max_backoff_s))

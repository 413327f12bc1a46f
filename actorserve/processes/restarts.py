"""Restarting what fails: with backoff, and not for ever. Pure; ``actorserve.processes.supervisor`` lives by it."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again, ``after_s`` from now."""

    after_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """It has failed ``num_failures`` times within the window: starting it again would not help."""

    num_failures: int


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """At most ``max_restarts`` within ``window_s``; the k-th waits ``backoff_s * 2**(k-1)``, at most the max."""

    max_restarts: int = 5
    window_s: float = 60.0
    backoff_s: float = 0.2
    max_backoff_s: float = 10.0


class RestartPolicy:
    """Decides for one child. Failures older than the window are forgiven, and the backoff with them."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._failed_at: deque[float] = deque()

    def failed(self, now: float) -> Restart | GiveUp:
        """The child has failed at ``now`` (which never runs backwards): what to do about it."""
        self._failed_at.append(now)
        while self._failed_at[0] <= now - self._limits.window_s:
            self._failed_at.popleft()
        num_failures = len(self._failed_at)
        if num_failures > self._limits.max_restarts:
            return GiveUp(num_failures)
        # The exponent is bounded so that a generous limit cannot overflow a float.
        backoff_s = self._limits.backoff_s * 2.0 ** min(num_failures - 1, 64)
        return Restart(min(backoff_s, self._limits.max_backoff_s))

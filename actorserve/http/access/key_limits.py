"""Limits on how many requests and tokens an API key may use in a minute, over all gateways of the host.

Each limit is a bucket that holds a minute's allowance and refills steadily. Every gateway has a bucket of its own, from
which it takes what all gateways of the host have counted for the key (``http.metrics``), so all of them see about the
same level, and no gateway waits for another. Tokens are known only when they are made: a key may use more than is left,
and then waits until the bucket is above zero again.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from actorserve.http.access.api_keys import ApiKey
from actorserve.http.host_counts import HostCounts
from actorserve.http.metrics.names import KEY_GENERATION_TOKENS, KEY_PROMPT_TOKENS, KEY_REQUESTS

_WINDOW_S: Final = 60.0
_MAX_KEYS: Final = 1000


class Beyond(NamedTuple):
    """A limit that a key has reached: its name, its value, and when the next request may be sent."""

    limit: str
    per_minute: int
    retry_after_s: float


class KeyLimits:
    """Says whether a key may send a request now. ``clock`` gives seconds that never decrease."""

    def __init__(self, counts: HostCounts, clock: Callable[[], float]) -> None:
        self._counts = counts
        self._clock = clock
        self._buckets: dict[tuple[str, str, int], _Bucket] = {}

    def check(self, key: ApiKey) -> Beyond | None:
        """The limit that a new request of this key would exceed; None if it may be sent."""
        requests, tokens = key.requests_per_minute, key.tokens_per_minute
        for limit, per_minute, least, counters in (
            ("requests_per_minute", requests, 1.0, (KEY_REQUESTS,)),
            ("tokens_per_minute", tokens, 0.0, (KEY_PROMPT_TOKENS, KEY_GENERATION_TOKENS)),
        ):
            if per_minute is None:
                continue
            used = sum(self._counts.total((counter, key.name)) for counter in counters)
            retry_after_s = self._bucket(key.name, limit, per_minute, used).wait_s(self._clock(), used, least)
            if retry_after_s > 0.0:
                return Beyond(limit, per_minute, retry_after_s)
        return None

    def _bucket(self, key: str, limit: str, per_minute: int, used: float) -> "_Bucket":
        bucket = self._buckets.get((key, limit, per_minute))
        if bucket is None:
            if len(self._buckets) >= _MAX_KEYS:  # names of keys that were removed long ago
                self._buckets.clear()
            bucket = self._buckets[key, limit, per_minute] = _Bucket(per_minute, self._clock(), used)
        return bucket


class _Bucket:
    def __init__(self, per_minute: int, now: float, used: float) -> None:
        self._size = self._level = float(per_minute)
        self._at_s = now
        self._used = used

    def wait_s(self, now: float, used: float, least: float) -> float:
        """How long until the level is at ``least`` (or above zero), when ``used`` has been taken since the start."""
        refilled = min(self._size, self._level + (now - self._at_s) * self._size / _WINDOW_S)
        self._level = refilled - max(0.0, used - self._used)
        self._at_s, self._used = now, used
        if self._level >= least and self._level > 0.0:
            return 0.0
        return max((least - self._level) * _WINDOW_S / self._size, 1e-3)

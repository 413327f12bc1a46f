"""An alarm that wakes an actor when a message arrives, or at a given time."""

import asyncio
from math import inf
from typing import Final

_LATER_S: Final = 0.0005  # uvloop rounds times to the nearest millisecond, and would ring a little too early


class Alarm:
    """Wakes one waiter. Its timer is replaced only if the waiter must wake before the timer would ring."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_rung = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf

    def ring(self) -> None:
        """Make the current ``wait`` return, or the next one if none is waiting."""
        self._is_rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def quiet(self) -> None:
        """Forget that the alarm was rung."""
        self._is_rung = False

    async def wait(self, until: float | None) -> None:
        """Return when the alarm is rung, or at ``until`` (``time.monotonic``), a timer's millisecond later at most. It
        may return earlier.
        """
        if self._is_rung:
            return
        if until is not None and until < self._timer_at:
            self.cancel()
            self._timer_at = until
            self._timer = self._loop.call_at(until + _LATER_S, self._on_timer)
        self._waiter = self._loop.create_future()
        await self._waiter

    def cancel(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, inf

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, inf
        self.ring()

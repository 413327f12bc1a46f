"""The queue between the gateway's sessions and one answer: effects on all requests of the answer, in order."""

import asyncio
from collections import deque
from collections.abc import Sequence

from actorserve.core.effects import Deliver, End

_MAX_EFFECTS_PER_WRITE = 64
"""Encoding blocks the event loop, so an answer with a long queue catches up in several writes."""


class AnswerStream:
    """The effects on the requests of one answer, in order.

    Effects wait here until they are taken, however slow the client is. A request delivers at most ``max_tokens``
    tokens, so the memory is bounded.
    """

    def __init__(self) -> None:
        self._effects: deque[Deliver | End] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """How many effects wait."""
        return len(self._effects)

    def put(self, effect: Deliver | End) -> None:
        """Never blocks."""
        self._effects.append(effect)
        self._wake()

    async def take(self, until: float) -> Sequence[Deliver | End]:
        """Take at most 64 effects. Waits for the first one until ``until`` (loop time), and is empty if none comes.

        It may be empty earlier. ``until`` never decreases from call to call.
        """
        if not self._effects:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            if self._timer is None:  # a timer for every token would cost more than all else here
                self._timer = loop.call_at(until, self._on_timer)
            await self._waiter
        num_taken = min(len(self._effects), _MAX_EFFECTS_PER_WRITE)
        return [self._effects.popleft() for _ in range(num_taken)]

    def close(self) -> None:
        """Nothing is taken any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        self._timer = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

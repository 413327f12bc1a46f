"""The base of every actor: a pure core, a mailbox, and the effects that the actor performs for its core.

The core decides, and the actor acts. The actor passes its core one message at a time, and ``Tick`` when the core's
deadline has come. It performs the effects that the core returns, in order, before the next message. ``step`` does one
round and knows no event loop, so tests drive it with a virtual clock; ``run`` steps the actor on asyncio.

Crash-only: an exception from the core or from ``perform`` is a bug. It is logged in one line, and propagates from
``run``.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Generic, Protocol, TypeVar

from actorserve.actors.alarm import Alarm
from actorserve.core.messages import Tick

_log: Final = logging.getLogger("actorserve.actors")

M = TypeVar("M")
"""The type of the messages in the actor's mailbox."""
E = TypeVar("E")
"""The type of the effects that its core returns."""
_M_in = TypeVar("_M_in", contravariant=True)


class Core(Protocol[_M_in, E]):
    """The part of an actor that decides. It does no I/O, and time is an argument."""

    def handle(self, message: _M_in | Tick, now: float, /) -> list[E]: ...

    def next_deadline(self) -> float | None: ...


class Actor(Generic[M, E]):
    """A core and its mailbox. A concrete actor says in ``perform`` what each effect of its core does.

    For ``run``, ``clock`` must be ``time.monotonic``, which event loops count from, too.
    """

    def __init__(self, name: str, core: Core[M, E], clock: Callable[[], float]) -> None:
        self.name: Final = name
        self._core = core
        self._clock = clock
        self._mailbox: deque[M] = deque()
        self._deadline: float | None = None  # at the end of the last step
        self._wake: Callable[[], None] | None = None
        self._is_stopping = False

    def perform(self, effect: E) -> None:
        """Perform one effect, without blocking. Raises: TypeError for an effect that this actor does not have."""
        raise TypeError(f"{self.name} was asked for {effect}")

    def tell(self, message: M) -> None:
        """Append a message to the mailbox. Call it on the loop's thread only.

        The mailbox is unbounded, because its senders are parts of this process that bound their own messages.
        """
        self._mailbox.append(message)
        if self._wake is not None:
            self._wake()

    def stop(self) -> None:
        """Make ``run`` return. From now on no message is handled."""
        self._is_stopping = True
        if self._wake is not None:
            self._wake()

    def step(self) -> bool:
        """Handle a bounded number of messages, and the deadline if it has come. True if more messages may be waiting.

        Raises: whatever the core or ``perform`` raises. The actor cannot be used after that.
        """
        if self._is_stopping:
            return False
        now = self._clock()
        for _ in range(len(self._mailbox)):
            self._handle(self._mailbox.popleft(), now)
        has_more = self._receive(now)
        now = self._clock()
        self._deadline = self.next_deadline()
        if self._deadline is not None and now >= self._deadline:
            self._on_deadline(now, is_behind=has_more)
            self._deadline = self.next_deadline()
        return bool(self._mailbox) or has_more

    def next_deadline(self) -> float | None:
        """When ``step`` must be called even if no message arrives."""
        return self._core.next_deadline()

    async def run(self) -> None:
        """Run until ``stop`` is called, or until a bug ends the actor. Raises: as ``step``."""
        alarm = Alarm(asyncio.get_running_loop())
        self._wake = alarm.ring
        try:
            with _CrashLine(self.name):
                self._open(alarm.ring)
                while not self._is_stopping:
                    alarm.quiet()
                    if self.step():
                        # More messages wait, but the loop's other tasks run first.
                        await asyncio.sleep(0)
                    else:
                        await alarm.wait(self._deadline)
        finally:
            alarm.cancel()
            self._wake = None
            self._close()

    # --- overridden by actors that also receive messages from other processes ----------------------------------------

    def _open(self, wake: Callable[[], None]) -> None:
        """``run`` begins. From now on, call ``wake`` when a message arrives."""

    def _close(self) -> None:
        """``run`` ends."""

    def _receive(self, now: float) -> bool:
        """Handle messages of other processes. True if more may be waiting."""
        return False

    def _on_deadline(self, now: float, *, is_behind: bool) -> None:
        """The time of ``next_deadline`` has come. ``is_behind``: messages may be waiting that were not handled yet."""
        deadline = self._core.next_deadline()
        if deadline is not None and now >= deadline:
            self._handle(Tick(), now)

    def _handle(self, message: M | Tick, now: float) -> None:
        """Pass a message to the core, and perform the effects."""
        if not self._is_stopping:
            for effect in self._core.handle(message, now):
                self.perform(effect)


class _CrashLine:
    """A context manager that logs in one line why an actor ended. The exception propagates."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else "?"
            _log.critical("%s ends: %s at %s", self._name, repr(error)[:500], where)

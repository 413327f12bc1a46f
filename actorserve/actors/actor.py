"""The base of every actor: a pure core, a mailbox, and the effects that the actor performs for its core.

The core decides, and the actor acts. The actor tells its core one message at a time, and ``Tick`` when the core's
deadline has come. It performs the effects that the core returns, in order, before the next message. ``step`` does one
round and knows no event loop, so tests drive it with a virtual clock; ``run`` steps the actor on asyncio.

Crash-only: an exception from the core, or from performing an effect, is a bug. It leaves ``run`` after one log line.
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
"""What the actor's mailbox holds."""
E = TypeVar("E")
"""What its core asks for."""
_M_in = TypeVar("_M_in", contravariant=True)


class Core(Protocol[_M_in, E]):
    """The part of an actor that decides. It does no I/O, and time is an argument."""

    def handle(self, message: _M_in | Tick, now: float, /) -> list[E]: ...

    def next_deadline(self) -> float | None: ...


class Actor(Generic[M, E]):
    """A core and its mailbox. A concrete actor says in ``perform`` what each effect of its core does.

    ``clock`` must be the event loop's (``loop.time``) under ``run``.
    """

    def __init__(self, name: str, core: Core[M, E], clock: Callable[[], float]) -> None:
        self.name: Final = name
        self._core = core
        self._clock = clock
        self._mailbox: deque[M] = deque()
        self._deadline: float | None = None  # as the last step left it
        self._wake: Callable[[], None] | None = None
        self._is_stopping = False

    def perform(self, effect: E) -> None:
        """Do what the core asks for. It must not block. Raises: TypeError for an effect that is not this actor's."""
        raise TypeError(f"{self.name} was asked for {effect}")

    def tell(self, message: M) -> None:
        """Put a message into the mailbox, behind those that are in it. Call it on the loop's thread only.

        The mailbox is unbounded: its senders are parts of this process, and each bounds what it tells.
        """
        self._mailbox.append(message)
        if self._wake is not None:
            self._wake()

    def stop(self) -> None:
        """Let ``run`` return. No message is handled any more."""
        self._is_stopping = True
        if self._wake is not None:
            self._wake()

    def step(self) -> bool:
        """Handle what has arrived (a bounded part of it) and what is due. True when more may be waiting.

        Raises: whatever the core or ``perform`` raises. The actor is of no use after that.
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
        """When ``step`` has something to do although nothing arrives."""
        return self._core.next_deadline()

    async def run(self) -> None:
        """Live until ``stop`` is called, or until a bug ends the actor. Raises: as ``step``."""
        alarm = Alarm(asyncio.get_running_loop())
        self._wake = alarm.ring
        try:
            with _CrashLine(self.name):
                self._open(alarm.ring)
                while not self._is_stopping:
                    alarm.quiet()
                    if self.step():
                        # More is waiting, but the other tasks on this loop have their turn first.
                        await asyncio.sleep(0)
                    else:
                        await alarm.wait(self._deadline)
        finally:
            alarm.cancel()
            self._wake = None
            self._close()

    # --- what an actor overrides that hears other processes, too -----------------------------------------------------

    def _open(self, wake: Callable[[], None]) -> None:
        """``run`` begins: call ``wake`` from now on when something has arrived."""

    def _close(self) -> None:
        """``run`` ends."""

    def _receive(self, now: float) -> bool:
        """Handle what other processes have sent. True when more may be waiting."""
        return False

    def _on_deadline(self, now: float, *, is_behind: bool) -> None:
        """The time of ``next_deadline`` has come. ``is_behind``: more messages may be waiting than were handled."""
        deadline = self._core.next_deadline()
        if deadline is not None and now >= deadline:
            self._handle(Tick(), now)

    def _handle(self, message: M | Tick, now: float) -> None:
        """Tell the core, and perform what it asks for."""
        if not self._is_stopping:
            for effect in self._core.handle(message, now):
                self.perform(effect)


class _CrashLine:
    """Says in one log line why an actor ended, and lets the exception go on."""

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

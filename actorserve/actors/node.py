"""The process shell: joins a transport, membership and one pure core on one thread.

A node decides nothing. It tells its core, in order and one at a time, what arrives, who comes and goes, and that a
deadline has come; it sends what the core wants sent, has membership meet whom the core wants to know, and hands every
other effect to the process. ``step`` does one round and knows no event loop, so that tests and replays drive it with a
virtual clock; ``run`` steps it on asyncio.

Crash-only: an exception from the core or from performing an effect is a bug; it leaves ``run`` after one log line.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from math import inf
from types import TracebackType
from typing import Final, Protocol

from actorserve.actors.membership import Membership
from actorserve.core.effects import Effect, Meet, Send
from actorserve.core.messages import Message, Peer, PeerDown, Tick
from actorserve.wire.journal import Entry
from actorserve.wire.transport import Transport

_BATCH: Final = 256
_log: Final = logging.getLogger("actorserve.node")


class Core(Protocol):
    """Something that decides: the coordinator's, a gateway's or a worker's."""

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]: ...

    def next_deadline(self) -> float | None: ...


def fresh_incarnation() -> int:
    """An incarnation for a process that starts now: microseconds of the wall clock.

    That leaves room for rejoining (one more each time). Should the wall clock have gone back, peers that remember a
    later one say so, and the process rejoins above it.
    """
    return time.time_ns() // 1000


class _CrashLine:
    """Says in one line why a node ended, and lets the exception go on."""

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


class _Alarm:
    """Wakes one waiter: when it is rung, or at a time. Its timer is set anew only where it has to wake earlier."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_rung = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf

    def ring(self) -> None:
        """Let ``wait`` end, or the next one."""
        self._is_rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def quiet(self) -> None:
        """Forget that it was rung."""
        self._is_rung = False

    async def wait(self, until: float | None) -> None:
        """Until it is rung, at the latest about ``until`` (loop time), and perhaps before."""
        if self._is_rung:
            return
        if until is not None and until < self._timer_at:
            self.cancel()
            self._timer_at = until
            self._timer = self._loop.call_at(until, self._on_timer)
        self._waiter = self._loop.create_future()
        await self._waiter

    def cancel(self) -> None:
        """Wake nobody at a time any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, inf

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, inf
        self.ring()


class Node:
    """One process of the cluster. Owns its transport, and closes it when ``run`` ends.

    ``clock`` is the loop's (``loop.time``) under ``run``. ``perform`` takes every effect but Send and Meet. ``record``
    gets each input of the core before the core sees it, so that a log shows what a crash was made of, and
    ``record_effects`` what the core had done for it, before any of that is done. ``on_down`` hears of peers
    that went down, once the core knows.
    """

    def __init__(
        self,
        transport: Transport,
        membership: Membership,
        core: Core,
        perform: Callable[[Effect], None],
        clock: Callable[[], float],
        record: Callable[[Entry], None] | None = None,
        record_effects: Callable[[Sequence[Effect]], None] | None = None,
        on_down: Callable[[Peer], None] | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._transport = transport
        self._membership = membership
        self._core = core
        self._perform = perform
        self._clock = clock
        self._record = record
        self._record_effects = record_effects
        self._on_down = on_down
        self._local: deque[Message] = deque()
        self._deadline: float | None = None  # as the last step left it
        self._wake: Callable[[], None] | None = None
        self._is_stopping = False

    @property
    def me(self) -> Peer:
        return self._transport.me

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Those whom the core holds for up, in the order of names."""
        return self._membership.peers

    def num_dropped_frames(self) -> int:
        """Frames that no well-behaved peer sends, or that were meant for another incarnation; each logged by reason."""
        return sum(count for what, count in self._transport.counts.items() if what.startswith("dropped: "))

    def inject(self, message: Message) -> None:
        """Tell the core something local, after what was injected before. Call on the loop's thread only.

        What comes from other processes is bounded by the transport's inbox; whoever injects bounds this.
        """
        self._local.append(message)
        if self._wake is not None:
            self._wake()

    def stop(self) -> None:
        """Say goodbye to everybody and let ``run`` return; nothing is handled any more."""
        if not self._is_stopping:
            self._is_stopping = True
            self._membership.leave()
            if self._wake is not None:
                self._wake()

    def start(self) -> None:
        """Begin to look for the others. ``run`` does it by itself."""
        self._membership.start(self._clock())

    def step(self) -> bool:
        """Handle what is there (a bounded part of it) and what is due. True when more may be there.

        Raises: whatever the core or ``perform`` raises; the node is then of no more use.
        """
        if self._is_stopping:
            return False
        now = self._clock()
        for _ in range(len(self._local)):
            self._tell(self._local.popleft(), now, None)
        arrived = self._transport.take(_BATCH)
        for sender, message in arrived:
            changes = self._membership.handle(message, now, sender)
            if changes is None:
                self._tell(message, now, sender)
            else:
                for change in changes:
                    self._tell(change, now, None)
        now = self._clock()
        self._deadline = self.next_deadline()
        if self._deadline is not None and now >= self._deadline:
            self._on_deadline(now, is_behind=len(arrived) == _BATCH)
            self._deadline = self.next_deadline()
        return bool(self._local) or len(arrived) == _BATCH

    def next_deadline(self) -> float | None:
        """When ``step`` has something to do, if nothing arrives before."""
        deadlines = (self._membership.next_deadline(), self._core.next_deadline())
        return min((at for at in deadlines if at is not None), default=None)

    def _on_deadline(self, now: float, *, is_behind: bool) -> None:
        deadline = self._membership.next_deadline()
        if deadline is not None and now >= deadline:
            for change in self._membership.tick(now, is_behind=is_behind):
                self._tell(change, now, None)
        deadline = self._core.next_deadline()
        if deadline is not None and now >= deadline:
            self._tell(Tick(), now, None)

    async def run(self) -> None:
        """Live until ``stop``, or until a bug ends us. Raises: as ``step``."""
        alarm = _Alarm(asyncio.get_running_loop())
        self._wake = alarm.ring
        try:
            with _CrashLine(self.me.name):
                self.start()
                self._transport.on_arrival(alarm.ring)
                while not self._is_stopping:
                    alarm.quiet()
                    if self.step():
                        # More is waiting: let the others on this loop have their turn first.
                        await asyncio.sleep(0)
                    else:
                        await alarm.wait(self._deadline)
        finally:
            alarm.cancel()
            self._wake = None
            self._transport.close()

    def _tell(self, message: Message, now: float, sender: Peer | None) -> None:
        if self._is_stopping:
            return
        if self._record is not None:
            self._record(Entry(now, sender, message))
        effects = self._core.handle(message, now, sender=sender)
        if self._record_effects is not None:
            self._record_effects(effects)
        for effect in effects:
            if type(effect) is Send:
                self._send(effect, now)
            elif type(effect) is Meet:
                self._membership.get_to_know(effect.peer, now)
            else:
                self._perform(effect)
        if self._on_down is not None and type(message) is PeerDown:
            self._on_down(message.peer)

    def _send(self, effect: Send, now: float) -> None:
        if not self._membership.is_up(effect.to):
            self.counts["sends to a peer that is down"] += 1
        elif self._transport.send(effect.to, effect.message):
            self._membership.sent(effect.to, now)
        else:
            self.counts["sends refused by the transport"] += 1

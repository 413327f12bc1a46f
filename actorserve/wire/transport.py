"""One-way FIFO links between processes: the guarantees of every transport, and the code that all of them share.

A process listens at one address. To send to a peer, it first connects to that peer's address. Messages of one process
to another arrive in order and never twice, but some may be lost (a full queue, a broken connection). A frame for
another incarnation of the receiver is dropped and counted, so a message for a dead process never reaches its successor.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from actorserve.core.messages import Hello, Message, Peer
from actorserve.errors import ProtocolError
from actorserve.wire.codec import MAX_FRAME_BYTES, decode, encode
from actorserve.wire.envelope import ANY_INCARNATION, HeadReader, make_bundle, make_head, messages_in
from actorserve.wire.refusals import Refusals
from actorserve.wire.trust import WRONG_MESSAGE, Rights, Trust

LOG_INTERVAL_S: Final = 1.0
_MAX_SHOWN_CHARS: Final = 80
_log: Final = logging.getLogger("actorserve.wire")


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """The limits of one transport. Queues are limited in messages, per link. ``max_links``: addresses to send to."""

    max_frame_bytes: int = MAX_FRAME_BYTES
    max_links: int = 4096
    send_queue: int = 4096
    receive_queue: int = 4096


class Transport(Protocol):
    """The module describes the guarantees. All calls come from one thread, and none of them blocks."""

    @property
    def me(self) -> Peer:
        """Our name and incarnation."""
        ...

    @property
    def address(self) -> str:
        """The address at which other processes reach us."""
        ...

    @property
    def counts(self) -> Counter[str]:
        """How many frames were ``sent``, ``received``, and dropped for each reason (``dropped: ...``)."""
        ...

    def on_refusal(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with a line for what is refused because of keys, as often as it is logged."""
        ...

    def reincarnate(self, incarnation: int) -> None:
        """Become this incarnation. Frames in flight to the old incarnation are dropped."""
        ...

    def connect(self, peer: Peer, address: str, *, takes_bundles: bool = False) -> bool:
        """Connect to ``peer`` (incarnation 0: any incarnation). False if the address cannot be used.

        If it ``takes_bundles``, messages to it after the first of each turn of the event loop may share a frame.
        """
        ...

    def disconnect(self, peer: Peer) -> None:
        """Disconnect from ``peer``; unknown peers are ignored."""
        ...

    def send(self, peer: Peer, message: Message) -> bool:
        """Queue ``message``. False, and counted, if it is too large, the queue is full, or there is no link.

        A full queue is only counted if the message shares a frame.
        """
        ...

    def take(self, limit: int = 256) -> list[tuple[Peer, Message]]:
        """Up to ``limit`` messages that have arrived, oldest first, with their senders."""
        ...

    def on_arrival(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when a message arrives, and when ``take`` leaves messages behind."""
        ...

    def close(self) -> None:
        """Release everything. Closing again does nothing."""
        ...


class FrameCounter:
    """Counts dropped frames, and logs them at most once a second."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.counts: Counter[str] = Counter()
        self._name = name
        self._clock = clock
        self._next_log_at = float("-inf")
        self._unlogged = 0

    def drop(self, reason: str, detail: str) -> None:
        """Count a dropped frame under ``reason``. Reasons are few; ``detail`` is only logged."""
        self.counts[f"dropped: {reason}"] += 1
        self._unlogged += 1
        now = self._clock()
        if now >= self._next_log_at:
            self._next_log_at = now + LOG_INTERVAL_S
            _log.warning("%s: dropped %d frame(s); the last: %s: %s", self._name, self._unlogged, reason, detail)
            self._unlogged = 0


class Framing:
    """Packs one process's messages into frames and unpacks them: envelope, fencing, limits, keys, counts. No socket.

    With a ``trust``, the key of each frame decides what its sender may send.
    """

    def __init__(
        self, me: Peer, limits: TransportLimits, clock: Callable[[], float], trust: Trust | None = None
    ) -> None:
        self.me = me
        self.limits = limits
        self.counter = FrameCounter(me.name, clock)
        self.refusals = Refusals(me.name, self.counter.counts, clock)
        self._trust = trust
        self._heads: dict[Peer, bytes] = {}
        self._reader = HeadReader()
        self._last: Message | None = None  # a message to many peers is encoded once
        self._last_body = b""

    def reincarnate(self, incarnation: int) -> None:
        self.me = Peer(self.me.name, incarnation)
        self._heads.clear()

    def forget(self, peer: Peer) -> None:
        self._heads.pop(peer, None)

    def encode(self, peer: Peer, message: Message) -> bytes | None:
        """The bytes of ``message`` to ``peer``; None (and counted) when its frame would be too large."""
        if message is not self._last:
            self._last_body = encode(message)
            self._last = message
        num_bytes = len(self._head(peer)) + len(self._last_body)
        if num_bytes > self.limits.max_frame_bytes:
            self.counter.drop("oversize", f"{type(message).__name__} of {num_bytes} bytes to {peer.name}")
            return None
        return self._last_body

    def pack(self, peer: Peer, bodies: Sequence[bytes]) -> bytes:
        """The frame that carries encoded messages to ``peer``. Several must fit into a bundle."""
        head = self._head(peer)
        return head + bodies[0] if len(bodies) == 1 else make_bundle(head, bodies)

    def unpack(self, frame: bytes, key: str = "") -> list[tuple[Peer, Message]]:
        """The messages in a frame, with their sender. Those that are not for us, malformed, or not allowed for ``key``,
        the public key of the connection, are counted and left out.
        """
        if len(frame) > self.limits.max_frame_bytes:
            self.counter.drop("oversize", f"{len(frame)} bytes arrived")
            return []
        try:
            sender, target, body_at = self._reader.read(frame)
            bodies = messages_in(frame, body_at)
        except ProtocolError as error:
            self.counter.drop("malformed envelope", str(error))
            return []
        rights = None if self._trust is None else self._trust.rights_of(key, sender.name)
        if rights is not None and rights.refusal is not None:
            self.refusals.refuse(rights.refusal, key, f"a frame of {sender.name[:_MAX_SHOWN_CHARS]!r}")
            return []
        if target.name != self.me.name or target.incarnation not in (self.me.incarnation, ANY_INCARNATION):
            self.counter.drop("wrong target", f"{sender.name} wrote to {target.name} {target.incarnation}")
            return []
        is_for_any = target.incarnation == ANY_INCARNATION
        messages = [
            (sender, message)
            for body in bodies
            if (message := self._decoded(body, sender, rights, key, is_for_any)) is not None
        ]
        self.counter.counts["received"] += len(messages)
        return messages

    def _head(self, peer: Peer) -> bytes:
        head = self._heads.get(peer)
        if head is None:
            head = self._heads[peer] = make_head(self.me, peer)
        return head

    def _decoded(
        self, body: memoryview, sender: Peer, rights: Rights | None, key: str, is_for_any: bool
    ) -> Message | None:
        """The message in ``body``; None (and counted) when it is malformed, or not allowed."""
        try:
            message = decode(body)
        except ProtocolError as error:
            self.counter.drop("malformed message", f"from {sender.name}: {error}")
            return None
        if rights is not None and type(message) not in rights.messages:
            self.refusals.refuse(WRONG_MESSAGE, key, f"{type(message).__name__} of {sender.name}")
            return None
        if is_for_any and type(message) is not Hello:
            self.counter.drop("wrong target", f"{sender.name} sent {type(message).__name__} without an incarnation")
            return None
        return message


class Inbox:
    """Messages that have arrived and were not taken yet, and the arrival callback."""

    def __init__(self) -> None:
        self.messages: deque[tuple[Peer, Message]] = deque()
        self._callback: Callable[[], None] | None = None

    def on_arrival(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        if self.messages:
            callback()

    def announce(self) -> None:
        if self._callback is not None:
            self._callback()

    def take(self, limit: int) -> list[tuple[Peer, Message]]:
        messages = self.messages
        if len(messages) <= limit:
            taken = list(messages)
            messages.clear()
            return taken
        taken = [messages.popleft() for _ in range(limit)]
        # After a bounded take the reader waits for the callback, so call it although no further message arrives.
        self.announce()
        return taken

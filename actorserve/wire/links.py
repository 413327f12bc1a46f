"""The base class of the transports. It keeps one link per address, for all incarnations at that address."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from actorserve.core.messages import Message, Peer
from actorserve.wire.envelope import MAX_BUNDLE_BYTES, MAX_BUNDLE_MESSAGES, num_bytes_in_bundle
from actorserve.wire.transport import Framing, Inbox, TransportLimits
from actorserve.wire.trust import Trust


class Outbox:
    """The messages that one process sends within one turn of its event loop, to peers that take bundles.

    The first message to a peer leaves at once, so that a single one does not wait. Later ones leave together, at the
    turn's end or when they fill a bundle.

    ``leave`` sends messages to a peer in one frame, and says whether they are on their way. ``at_end_of_turn`` arranges
    that ``flush`` is called then. The content of a bundle has at most ``max_bytes``.
    """

    def __init__(
        self,
        leave: Callable[[Peer, list[bytes]], bool],
        at_end_of_turn: Callable[[], None],
        max_bytes: int = MAX_BUNDLE_BYTES,
    ) -> None:
        self._leave = leave
        self._at_end_of_turn = at_end_of_turn
        self._max_bytes = max_bytes
        self._takers: set[Peer] = set()
        self._waiting: dict[Peer, list[bytes]] = {}  # of the peers that got a message in this turn
        self._num_bytes: dict[Peer, int] = {}

    def bundle(self, peer: Peer) -> None:
        """``peer`` takes bundles."""
        self._takers.add(peer)

    def send(self, peer: Peer, body: bytes) -> bool:
        """Send a message, or let it wait for the turn's end. False if it is lost; True if it has left, or waits."""
        if peer not in self._takers:
            return self._leave(peer, [body])
        waiting = self._waiting.get(peer)
        if waiting is None:
            has_left = self._leave(peer, [body])
            is_first = not self._waiting
            self._waiting[peer], self._num_bytes[peer] = [], 0
            if is_first:
                self._at_end_of_turn()
            return has_left
        num_bytes = num_bytes_in_bundle(body)
        if len(waiting) == MAX_BUNDLE_MESSAGES or (waiting and self._num_bytes[peer] + num_bytes > self._max_bytes):
            self._leave(peer, waiting)
            waiting = self._waiting[peer] = []
            self._num_bytes[peer] = 0
        waiting.append(body)
        self._num_bytes[peer] += num_bytes
        return True

    def flush(self) -> None:
        """The turn ends: send all that waits."""
        for peer, waiting in self._waiting.items():
            if waiting:
                self._leave(peer, waiting)
        self._waiting.clear()
        self._num_bytes.clear()

    def forget(self, peer: Peer) -> None:
        """The link to ``peer`` ends, or is another one from now on. What waits leaves first."""
        self._takers.discard(peer)
        self._num_bytes.pop(peer, None)
        waiting = self._waiting.pop(peer, None)
        if waiting:
            self._leave(peer, waiting)


class Link:
    """The connection to an address, and the peers for which it stays open."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.peers: set[Peer] = set()


L = TypeVar("L", bound=Link)


class LinkedTransport(ABC, Generic[L]):
    """A ``Transport`` whose subclasses move the bytes."""

    def __init__(
        self, me: Peer, limits: TransportLimits | None, clock: Callable[[], float], trust: Trust | None = None
    ) -> None:
        self._framing = Framing(me, limits or TransportLimits(), clock, trust)
        self._inbox = Inbox()
        max_bytes = min(MAX_BUNDLE_BYTES, self._framing.limits.max_frame_bytes // 2)
        self._outbox = Outbox(self._leave, self._at_end_of_turn, max_bytes)
        self._links: dict[str, L] = {}
        self._routes: dict[Peer, L] = {}
        self._closed = False

    @property
    @abstractmethod
    def address(self) -> str: ...

    @abstractmethod
    def _open(self, peer: Peer, address: str) -> L | None:
        """A new link, or None if the address cannot be used."""

    @abstractmethod
    def _shut(self, link: L) -> None: ...

    @abstractmethod
    def _put(self, link: L, frame: bytes) -> bool:
        """Queue a frame without blocking. False when the link's queue is full."""

    @abstractmethod
    def _at_end_of_turn(self) -> None:
        """Arrange that the outbox is flushed when the event loop's turn ends."""

    @abstractmethod
    def _fetch(self) -> None:
        """Fill the empty inbox with the messages that have arrived and were not announced yet."""

    @abstractmethod
    def _on_taken(self) -> None:
        """The inbox is no longer full."""

    @abstractmethod
    def _release(self) -> None:
        """Release all other resources, after all links are shut."""

    @property
    def me(self) -> Peer:
        return self._framing.me

    def on_refusal(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with a line for what is refused because of keys, as often as it is logged."""
        self._framing.refusals.on_line(callback)

    @property
    def counts(self) -> Counter[str]:
        return self._framing.counter.counts

    def reincarnate(self, incarnation: int) -> None:
        self._outbox.flush()  # what the old incarnation has sent is from the old one
        self._framing.reincarnate(incarnation)

    def connect(self, peer: Peer, address: str, *, takes_bundles: bool = False) -> bool:
        if self._closed:
            return False
        route = self._routes.get(peer)
        if route is None or route.address != address:
            self.disconnect(peer)
            link = self._links.get(address) or self._open(peer, address)
            if link is None:
                return False
            self._links[address] = link
            link.peers.add(peer)
            self._routes[peer] = link
        if takes_bundles:
            self._outbox.bundle(peer)
        return True

    def disconnect(self, peer: Peer) -> None:
        self._outbox.forget(peer)
        link = self._routes.pop(peer, None)
        self._framing.forget(peer)
        if link is None:
            return
        link.peers.discard(peer)
        if not link.peers:
            del self._links[link.address]
            self._shut(link)

    def send(self, peer: Peer, message: Message) -> bool:
        if peer not in self._routes:
            self._framing.counter.drop("not connected", f"{type(message).__name__} to {peer.name} {peer.incarnation}")
            return False
        body = self._framing.encode(peer, message)
        return body is not None and self._outbox.send(peer, body)

    def _leave(self, peer: Peer, bodies: list[bytes]) -> bool:
        """Queue a frame of encoded messages. False, and counted, when the queue is full."""
        if not self._put(self._routes[peer], self._framing.pack(peer, bodies)):
            for _ in bodies:
                self._framing.counter.drop("queue full", f"a message to {peer.name}")
            return False
        self.counts["sent"] += len(bodies)
        return True

    def take(self, limit: int = 256) -> list[tuple[Peer, Message]]:
        if not self._inbox.messages and not self._closed:
            self._fetch()
        taken = self._inbox.take(limit)
        if taken and not self._closed:
            self._on_taken()
        return taken

    def on_arrival(self, callback: Callable[[], None]) -> None:
        self._inbox.on_arrival(callback)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in list(self._routes):
            self.disconnect(peer)
        self._release()

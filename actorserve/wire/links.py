"""The base class of the transports. It keeps one link per address, for all incarnations at that address."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from actorserve.core.messages import Message, Peer
from actorserve.wire.transport import Framing, Inbox, TransportLimits
from actorserve.wire.trust import Trust


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
        self._framing.reincarnate(incarnation)

    def connect(self, peer: Peer, address: str) -> bool:
        if self._closed:
            return False
        route = self._routes.get(peer)
        if route is not None and route.address == address:
            return True
        self.disconnect(peer)
        link = self._links.get(address) or self._open(peer, address)
        if link is None:
            return False
        self._links[address] = link
        link.peers.add(peer)
        self._routes[peer] = link
        return True

    def disconnect(self, peer: Peer) -> None:
        link = self._routes.pop(peer, None)
        self._framing.forget(peer)
        if link is None:
            return
        link.peers.discard(peer)
        if not link.peers:
            del self._links[link.address]
            self._shut(link)

    def send(self, peer: Peer, message: Message) -> bool:
        link = self._routes.get(peer)
        if link is None:
            self._framing.counter.drop("not connected", f"{type(message).__name__} to {peer.name} {peer.incarnation}")
            return False
        frame = self._framing.pack(peer, message)
        if frame is None:
            return False
        if not self._put(link, frame):
            self._framing.counter.drop("queue full", f"{type(message).__name__} to {peer.name}")
            return False
        self.counts["sent"] += 1
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

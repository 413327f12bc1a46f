"""The in-memory twin of the ZeroMQ transport: same promises, one process, no time of its own.

A ``Hub`` stands for the network. As with ZeroMQ, a link to an address where nobody listens yet keeps what is sent until
somebody does, and a receiver's full queue holds messages back on the sender's side. A test can ``cut`` two processes
from each other: what is sent meanwhile is lost.
"""

from collections import Counter, deque
from collections.abc import Callable

from actorserve.core.messages import Message, Peer
from actorserve.errors import ActorserveError
from actorserve.wire.transport import Framing, Inbox, TransportLimits


class _Link:
    """A one-way queue from one endpoint to an address."""

    def __init__(self, source: str, address: str) -> None:
        self.source = source
        self.address = address
        self.frames: deque[bytes] = deque()
        self.peers: set[Peer] = set()


class Hub:
    """The network: who listens where, and every open link."""

    def __init__(self) -> None:
        self._listeners: dict[str, MemoryTransport] = {}
        self._links: dict[str, list[_Link]] = {}
        self._cuts: set[tuple[str, str]] = set()

    def cut(self, one: str, other: str) -> None:
        """Lose everything between the processes that listen at these addresses, both ways."""
        self._cuts |= {(one, other), (other, one)}

    def heal(self, one: str, other: str) -> None:
        """Undo ``cut``."""
        self._cuts -= {(one, other), (other, one)}

    def _bind(self, transport: "MemoryTransport") -> None:
        if transport.address in self._listeners:
            raise ActorserveError(f"{transport.address} is taken")
        self._listeners[transport.address] = transport
        self._flow(transport.address)

    def _unbind(self, address: str) -> None:
        del self._listeners[address]

    def _open(self, link: _Link) -> None:
        self._links.setdefault(link.address, []).append(link)

    def _shut(self, link: _Link) -> None:
        self._links[link.address].remove(link)
        if not self._links[link.address]:
            del self._links[link.address]

    def _flow(self, address: str) -> None:
        listener = self._listeners.get(address)
        if listener is not None:
            for link in self._links.get(address, ()):
                self._deliver(link, listener)

    def _deliver(self, link: _Link, listener: "MemoryTransport") -> None:
        if (link.source, link.address) in self._cuts:
            link.frames.clear()
        while link.frames and listener.has_room:
            listener.arrive(link.frames.popleft())

    def _push(self, link: _Link) -> None:
        listener = self._listeners.get(link.address)
        if listener is not None:
            self._deliver(link, listener)


class MemoryTransport:
    """A ``Transport`` on a hub. ``address`` is any string that nobody else on the hub listens at."""

    def __init__(
        self,
        hub: Hub,
        me: Peer,
        address: str,
        clock: Callable[[], float],
        limits: TransportLimits | None = None,
    ) -> None:
        self._hub = hub
        self._framing = Framing(me, limits or TransportLimits(), clock)
        self._address = address
        self._inbox = Inbox()
        self._links: dict[str, _Link] = {}
        self._routes: dict[Peer, _Link] = {}
        self._closed = False
        hub._bind(self)

    @property
    def me(self) -> Peer:
        return self._framing.me

    @property
    def address(self) -> str:
        return self._address

    @property
    def counts(self) -> Counter[str]:
        return self._framing.counter.counts

    @property
    def has_room(self) -> bool:
        return len(self._inbox.messages) < self._framing.limits.receive_queue

    def reincarnate(self, incarnation: int) -> None:
        self._framing.reincarnate(incarnation)

    def connect(self, peer: Peer, address: str) -> bool:
        if not address or self._closed:
            return False
        route = self._routes.get(peer)
        if route is not None and route.address == address:
            return True
        self.disconnect(peer)
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = _Link(self._address, address)
            self._hub._open(link)
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
            self._hub._shut(link)

    def send(self, peer: Peer, message: Message) -> bool:
        link = self._routes.get(peer)
        if link is None:
            self._framing.counter.drop("not connected", f"{type(message).__name__} to {peer.name} {peer.incarnation}")
            return False
        frame = self._framing.pack(peer, message)
        if frame is None:
            return False
        if len(link.frames) >= self._framing.limits.send_queue:
            self._framing.counter.drop("queue full", f"{type(message).__name__} to {peer.name}")
            return False
        link.frames.append(frame)
        self.counts["sent"] += 1
        self._hub._push(link)
        return True

    def arrive(self, frame: bytes) -> None:
        """The hub brings a frame."""
        unpacked = self._framing.unpack(frame)
        if unpacked is not None:
            self._inbox.messages.append(unpacked)
            self._inbox.announce()

    def take(self, limit: int = 256) -> list[tuple[Peer, Message]]:
        taken = self._inbox.take(limit)
        if taken and not self._closed:
            self._hub._flow(self._address)
        return taken

    def on_arrival(self, callback: Callable[[], None]) -> None:
        self._inbox.on_arrival(callback)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in list(self._routes):
            self.disconnect(peer)
        self._hub._unbind(self._address)

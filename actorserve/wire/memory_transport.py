"""An in-memory transport with the guarantees of the ZeroMQ transport, in one process and without a clock.

A ``Hub`` stands for the network. As with ZeroMQ, a link keeps its messages until a transport listens at its
address, and messages wait on the sender's side while the receiver's queue is full. A test can ``cut`` two processes
from each other. Messages between them are then lost.
"""

from collections import deque
from collections.abc import Callable

from actorserve.core.messages import Peer
from actorserve.errors import ActorserveError
from actorserve.wire.links import Link, LinkedTransport
from actorserve.wire.transport import TransportLimits


class _Queue(Link):
    """A one-way queue from one endpoint to an address."""

    def __init__(self, source: str, address: str) -> None:
        super().__init__(address)
        self.source = source
        self.frames: deque[bytes] = deque()


class Hub:
    """The network: the transport at each address, and every open link."""

    def __init__(self) -> None:
        self._listeners: dict[str, MemoryTransport] = {}
        self._links: dict[str, list[_Queue]] = {}
        self._cuts: set[tuple[str, str]] = set()

    def cut(self, one: str, other: str) -> None:
        """Lose all messages between the processes at these addresses, in both directions."""
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

    def _open(self, link: _Queue) -> None:
        self._links.setdefault(link.address, []).append(link)

    def _shut(self, link: _Queue) -> None:
        self._links[link.address].remove(link)
        if not self._links[link.address]:
            del self._links[link.address]

    def _flow(self, address: str) -> None:
        listener = self._listeners.get(address)
        if listener is not None:
            for link in self._links.get(address, ()):
                self._deliver(link, listener)

    def _deliver(self, link: _Queue, listener: "MemoryTransport") -> None:
        if (link.source, link.address) in self._cuts:
            link.frames.clear()
        while link.frames and listener.has_room:
            listener.arrive(link.frames.popleft())

    def _push(self, link: _Queue) -> None:
        listener = self._listeners.get(link.address)
        if listener is not None:
            self._deliver(link, listener)


class MemoryTransport(LinkedTransport[_Queue]):
    """A ``Transport`` on a hub. ``address`` is any string that is not taken on the hub."""

    def __init__(
        self,
        hub: Hub,
        me: Peer,
        address: str,
        clock: Callable[[], float],
        limits: TransportLimits | None = None,
    ) -> None:
        super().__init__(me, limits, clock)
        self._hub = hub
        self._address = address
        hub._bind(self)

    @property
    def address(self) -> str:
        return self._address

    @property
    def has_room(self) -> bool:
        return len(self._inbox.messages) < self._framing.limits.receive_queue

    def arrive(self, frame: bytes) -> None:
        """Receive a frame from the hub."""
        unpacked = self._framing.unpack(frame)
        if unpacked:
            self._inbox.messages.extend(unpacked)
            self._inbox.announce()

    def _open(self, peer: Peer, address: str) -> _Queue | None:
        if not address:
            return None
        link = _Queue(self._address, address)
        self._hub._open(link)
        return link

    def _shut(self, link: _Queue) -> None:
        self._hub._shut(link)

    def _put(self, link: _Queue, frame: bytes) -> bool:
        if len(link.frames) >= self._framing.limits.send_queue:
            return False
        link.frames.append(frame)
        self._hub._push(link)
        return True

    def _at_end_of_turn(self) -> None:
        self._outbox.flush()  # every call is a turn of its own, so no messages share a frame

    def _fetch(self) -> None:
        """Nothing to do: the hub has already delivered all frames that fit into the inbox."""

    def _on_taken(self) -> None:
        self._hub._flow(self._address)

    def _release(self) -> None:
        self._hub._unbind(self._address)

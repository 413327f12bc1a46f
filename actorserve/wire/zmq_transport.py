"""The ZeroMQ transport: one ROUTER bound to be reached at, one DEALER per address that we send to.

The ROUTER only receives and the DEALERs only send, so no frame ever waits for an answer. Sockets are read straight from
the event loop, many messages a wakeup: the asyncio face of pyzmq costs a future and a timer for each message.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import zmq

from actorserve.core.messages import Message, Peer
from actorserve.errors import ActorserveError
from actorserve.wire.transport import Framing, Inbox, TransportLimits

_READ_BATCH: Final = 256
_LINGER_MS: Final = 200  # after closing: time for a Goodbye to leave
_RECONNECT_MS: Final = 50
_RECONNECT_MAX_MS: Final = 1000
_HEARTBEAT_MS: Final = 2000  # of the connection, not of the process: finds broken hosts and cables
_SCHEMES: Final = ("ipc://", "tcp://")


@dataclass(slots=True)
class _Link:
    address: str
    socket: "zmq.Socket[bytes]"
    peers: set[Peer] = field(default_factory=set)


class ZmqTransport:
    """A ``Transport`` over ``ipc://`` or ``tcp://``. Made, used and closed on the thread of a running event loop.

    Only ``close`` may block, for at most the linger (0.2 s), while last messages leave.

    ``bind`` is the address to listen at; ``tcp://127.0.0.1:*`` takes a free port, and ``address`` says which.
    Raises: ActorserveError where it can not be bound.
    """

    def __init__(self, me: Peer, bind: str, limits: TransportLimits | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._framing = Framing(me, limits or TransportLimits(), self._loop.time)
        self._inbox = Inbox()
        self._links: dict[str, _Link] = {}
        self._routes: dict[Peer, _Link] = {}
        self._closed = False
        self._read_scheduled = False
        self._stalled = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._configure(self._router)
        # One byte over the bound is let through to us: we count what is too large, libzmq would only hang up.
        self._router.setsockopt(zmq.MAXMSGSIZE, self._framing.limits.max_frame_bytes + 1)
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self._router.close(0)
            self._context.term()
            raise ActorserveError(f"cannot listen at {bind}: {error.strerror}") from None
        self._address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._fd = self._router.fileno()
        self._loop.add_reader(self._fd, self._read)
        self._schedule_read()

    @property
    def me(self) -> Peer:
        return self._framing.me

    @property
    def address(self) -> str:
        return self._address

    @property
    def counts(self) -> Counter[str]:
        return self._framing.counter.counts

    def reincarnate(self, incarnation: int) -> None:
        self._framing.reincarnate(incarnation)

    def connect(self, peer: Peer, address: str) -> bool:
        if self._closed or not address.startswith(_SCHEMES):
            return False
        route = self._routes.get(peer)
        if route is not None and route.address == address:
            return True
        self.disconnect(peer)
        link = self._links.get(address)
        if link is None:
            socket = self._context.socket(zmq.DEALER)
            self._configure(socket)
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                socket.close(0)
                self._framing.counter.drop("bad address", f"{peer.name}: {error.strerror}")
                return False
            link = self._links[address] = _Link(address, socket)
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
            link.socket.close(_LINGER_MS)

    def send(self, peer: Peer, message: Message) -> bool:
        link = self._routes.get(peer)
        if link is None:
            self._framing.counter.drop("not connected", f"{type(message).__name__} to {peer.name} {peer.incarnation}")
            return False
        frame = self._framing.pack(peer, message)
        if frame is None:
            return False
        try:
            link.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._framing.counter.drop("queue full", f"{type(message).__name__} to {peer.name}")
            return False
        self.counts["sent"] += 1
        return True

    def take(self, limit: int = 256) -> list[tuple[Peer, Message]]:
        taken = self._inbox.take(limit)
        if taken and self._stalled and not self._closed:
            # Reading stopped at a full inbox, and the descriptor tells of new arrivals only.
            self._stalled = False
            self._schedule_read()
        return taken

    def on_arrival(self, callback: Callable[[], None]) -> None:
        self._inbox.on_arrival(callback)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        for peer in list(self._routes):
            self.disconnect(peer)
        self._router.close(0)
        # Waits for what still leaves, at most the linger.
        self._context.term()

    def _configure(self, socket: "zmq.Socket[bytes]") -> None:
        # Without IMMEDIATE a message waits for a peer that is not there yet; one for a dead incarnation is dropped by
        # whoever takes its place.
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, self._framing.limits.send_queue)
        socket.setsockopt(zmq.RCVHWM, self._framing.limits.receive_queue)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)

    def _schedule_read(self) -> None:
        if not self._read_scheduled:
            self._read_scheduled = True
            self._loop.call_soon(self._read_again)

    def _read_again(self) -> None:
        self._read_scheduled = False
        self._read()

    def _read(self) -> None:
        """Read until nothing is left (the descriptor is edge-triggered), the inbox is full, or the turn is over."""
        if self._closed:
            return
        messages, room = self._inbox.messages, self._framing.limits.receive_queue
        num_before = len(messages)
        for _ in range(_READ_BATCH):
            if len(messages) >= room:
                self._stalled = True
                break
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(parts) != 2:
                self._framing.counter.drop("malformed envelope", f"{len(parts)} parts")
                continue
            unpacked = self._framing.unpack(parts[1])
            if unpacked is not None:
                messages.append(unpacked)
        else:
            self._schedule_read()
        if len(messages) > num_before:
            self._inbox.announce()

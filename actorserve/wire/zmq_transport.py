"""The ZeroMQ transport: one ROUTER to receive with, and one DEALER per address that we send to.

The ROUTER only receives and the DEALERs only send, so no frame waits for an answer. The event loop reads the sockets
directly, many messages per wakeup, because pyzmq's asyncio interface costs a future and a timer per message.
"""

import asyncio
from typing import Final

import zmq

from actorserve.core.messages import Peer
from actorserve.errors import ActorserveError
from actorserve.wire.curve.addresses import is_reachable_from_elsewhere
from actorserve.wire.curve.handshakes import FAILED, HandshakeMonitor
from actorserve.wire.curve.sockets import FRAME_OVERHEAD, connect_with_curve, serve_with_curve
from actorserve.wire.curve.zap import ZapHandler
from actorserve.wire.links import Link, LinkedTransport
from actorserve.wire.transport import TransportLimits
from actorserve.wire.trust import Trust

_READ_BATCH: Final = 256
_ASKED_FOR: Final = 2  # reads per turn that first ask the socket whether a frame has arrived
_POLLIN: Final = int(zmq.POLLIN)  # an int, because & with the enum is slower than asking the socket
_KEY_OF_SENDER: Final = b"User-Id"  # what the ZAP handler has answered; bytes, because pyzmq encodes a str each time
_LINGER_MS: Final = 200  # after closing: time for a Goodbye to leave
_RECONNECT_MS: Final = 50
_RECONNECT_MAX_MS: Final = 200
_HEARTBEAT_MS: Final = 2000  # of the connection, not of the process: it finds broken hosts and cables
_SCHEMES: Final = ("ipc://", "tcp://")


class _Dealer(Link):
    """``server_key``: what the process at the address must hold; None for a plain socket."""

    def __init__(self, address: str, server_key: str | None, socket: "zmq.Socket[bytes]") -> None:
        super().__init__(address)
        self.server_key = server_key
        self.socket = socket
        self.num_accepted = 0  # messages that the socket took


class ZmqTransport(LinkedTransport[_Dealer]):
    """A ``Transport`` over ``ipc://`` or ``tcp://``. Construct, use and close it on the thread of a running event loop.

    Only ``close`` may block, for at most 0.2 s (the linger), while the last messages are sent.

    ``bind`` is the address to listen at; ``tcp://127.0.0.1:*`` takes a free port, which ``address`` then contains.

    With a ``trust``, every tcp socket is encrypted by CURVE, and each message is checked by its sender's key. ipc
    sockets stay plain, because only their owner may enter the folder. Without a ``trust``, tcp is for loopback alone.

    Raises: ActorserveError if ``bind`` cannot be bound, or needs keys.
    """

    def __init__(self, me: Peer, bind: str, limits: TransportLimits | None = None, trust: Trust | None = None) -> None:
        if trust is None and is_reachable_from_elsewhere(bind):
            raise ActorserveError(
                f"cannot listen at {bind} without keys, because other machines could connect; make keys with "
                "`actorserve keys`, or listen on 127.0.0.1"
            )
        self._loop = asyncio.get_running_loop()
        is_tcp = bind.startswith("tcp://")
        super().__init__(me, limits, self._loop.time, trust if is_tcp else None)
        self._trust = trust
        self._read_scheduled = False
        self._stalled = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        num_own = 1 + (0 if trust is None else ZapHandler.NUM_SOCKETS + HandshakeMonitor.NUM_SOCKETS)
        self._context.set(zmq.MAX_SOCKETS, self._framing.limits.max_links + num_own)
        self._is_guarded = trust is not None and is_tcp
        self._guards: list[ZapHandler | HandshakeMonitor] = []
        self._router = self._context.socket(zmq.ROUTER)
        self._configure(self._router)
        # A frame one byte over the bound still reaches us, so that we count it; libzmq would only close the connection.
        self._router.setsockopt(zmq.MAXMSGSIZE, self._framing.limits.max_frame_bytes + 1)
        self._router.setsockopt(zmq.IPV6, "[" in bind)
        if trust is not None:
            if self._is_guarded:
                self._guard(self._router, trust)
            trust.on_change(self._follow_keys)
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self._release_sockets()
            raise ActorserveError(f"cannot listen at {bind}: {error.strerror}") from None
        self._address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._fd = self._router.fileno()
        self._loop.add_reader(self._fd, self._read)
        self._schedule_read()

    @property
    def address(self) -> str:
        return self._address

    def _guard(self, router: "zmq.Socket[bytes]", trust: Trust) -> None:
        """Accept only the keys that ``trust`` knows."""
        serve_with_curve(router, trust.own)
        router.setsockopt(zmq.MAXMSGSIZE, self._framing.limits.max_frame_bytes + 1 + FRAME_OVERHEAD)
        self._guards.append(ZapHandler(self._context, trust, self._framing.refusals))
        refuse = self._framing.refusals.refuse
        self._guards.append(HandshakeMonitor(router, lambda why: refuse(FAILED, "", f"a connection: {why}")))

    def _open(self, peer: Peer, address: str) -> _Dealer | None:
        if not address.startswith(_SCHEMES):
            return None
        key = None
        if address.startswith("tcp://") and self._trust is not None:
            key = self._trust.key_of_process(peer.name)
            if key is None:
                self._framing.counter.drop("no key", f"of the host of {peer.name[:80]!r}, which is at {address}")
                return None
        elif is_reachable_from_elsewhere(address):
            self._framing.counter.drop("no key", f"to encrypt what goes to {peer.name[:80]!r} at {address}")
            return None
        socket = self._connected(peer, address, key)
        return None if socket is None else _Dealer(address, key, socket)

    def _connected(self, peer: Peer, address: str, key: str | None) -> "zmq.Socket[bytes] | None":
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            why = f"{error.strerror}; this process may have {self._framing.limits.max_links} links (see ulimit -Hn)"
            self._framing.counter.drop("no socket", f"for {peer.name}: {why}")
            return None
        self._configure(socket)
        socket.setsockopt(zmq.IPV6, "[" in address)
        if key is not None and self._trust is not None:
            connect_with_curve(socket, self._trust.own, key)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close(0)
            self._framing.counter.drop("bad address", f"{peer.name}: {error.strerror}")
            return None
        return socket

    def _shut(self, link: _Dealer) -> None:
        link.socket.close(_LINGER_MS)

    def _put(self, link: _Dealer, frame: bytes) -> bool:
        try:
            link.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return link.num_accepted < self._framing.limits.send_queue and self._revive(link, frame)
        link.num_accepted += 1
        return True

    def _revive(self, link: _Dealer, frame: bytes) -> bool:
        """Connect again, and send ``frame``. The queue cannot be full yet, so ZeroMQ has given the connection up for
        good. It does so if the process at the address refuses our key, or has no keys, and both may change.
        """
        link.socket.close(0)
        socket = self._connected(next(iter(link.peers)), link.address, link.server_key)
        if socket is None:
            return False
        link.socket = socket
        link.num_accepted = 1
        link.socket.send(frame, zmq.NOBLOCK)
        return True

    def _at_end_of_turn(self) -> None:
        self._loop.call_soon(self._outbox.flush)

    def _follow_keys(self) -> None:
        """The keys have changed. Shut the links to processes whose hosts have another key now, or none."""
        if self._closed or self._trust is None:
            return
        for link in list(self._links.values()):
            if link.server_key is not None:
                for peer in list(link.peers):
                    if self._trust.key_of_process(peer.name) != link.server_key:
                        self.disconnect(peer)

    def _on_taken(self) -> None:
        if self._stalled:
            # Reading stopped because the inbox was full, and the descriptor only signals new arrivals.
            self._stalled = False
            self._schedule_read()

    def _release(self) -> None:
        self._loop.remove_reader(self._fd)
        self._release_sockets()

    def _release_sockets(self) -> None:
        for guard in reversed(self._guards):
            guard.close()
        self._router.close(0)
        # This waits for unsent messages, for at most the linger.
        self._context.term()

    def _configure(self, socket: "zmq.Socket[bytes]") -> None:
        # IMMEDIATE is not set, so that messages wait for a peer that has not started yet. The successor of a dead
        # incarnation drops the messages for it.
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
        """Read the frames that have arrived, and announce them."""
        if self._closed:
            return
        num_before = len(self._inbox.messages)
        self._fetch()
        if len(self._inbox.messages) > num_before:
            self._inbox.announce()

    def _fetch(self) -> None:
        """Read until nothing is left (the descriptor is edge-triggered), the inbox is full, or the turn is over."""
        router, messages, capacity = self._router, self._inbox.messages, self._framing.limits.receive_queue
        end = len(messages) + _READ_BATCH  # a frame may hold many messages
        for number in range(_READ_BATCH):
            if len(messages) >= capacity:
                self._stalled = True
                return
            # Usually one frame has arrived. Asking for a second one costs less than the exception if there is none.
            if number < _ASKED_FOR and not int(router.getsockopt(zmq.EVENTS)) & _POLLIN:
                return
            try:
                router.recv(zmq.NOBLOCK)  # ZeroMQ's own name of the sender, which is not used
            except zmq.Again:
                return
            # A part that is not copied at first tells whether more follow, at a third of what asking the socket costs.
            part = router.recv(zmq.NOBLOCK, copy=False)
            if part.more:
                num_parts = 1 + len(router.recv_multipart(zmq.NOBLOCK))
                self._framing.counter.drop("malformed envelope", f"{num_parts} parts")
                continue
            key = str(part.get(_KEY_OF_SENDER)) if self._is_guarded else ""
            messages.extend(self._framing.unpack(part.bytes, key))
            if len(messages) >= end:
                break
        self._schedule_read()

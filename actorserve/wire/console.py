"""The operators' socket: a ROUTER of the coordinator, to which each console connects with a DEALER.

It is apart from the cluster's own sockets, because a console is no member of the cluster: it has no address at which
the coordinator could reach it, and no incarnation. So answers go back over the connection on which a command came.

A frame is one encoded message (``wire.codec``). ``Callers`` says, in one place, who a caller is and which role it has:
on a socket of this host the operating system has checked already that the caller may enter the runtime folder, and so
the caller is an operator; over tcp the caller's key decides.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import zmq

from actorserve.core.messages import Answer, Command, Message, Peer
from actorserve.core.operations.verbs import CALLER_PREFIX, OperatorRole
from actorserve.errors import ActorserveError, ProtocolError
from actorserve.wire.codec import decode, encode
from actorserve.wire.transport import FrameCounter

CONSOLE_SOCKET: Final = "console.sock"
MAX_COMMAND_BYTES: Final = 16 * 1024
MAX_CONSOLES: Final = 256
COMMANDS_PER_S: Final = 50.0
_BURST: Final = 100.0
_UNREAD_ANSWERS: Final = 64  # of one console; further ones mean that it does not read
_READ_BATCH: Final = 32
_POLLIN: Final = int(zmq.POLLIN)
_HEARTBEAT_MS: Final = 2000
_log: Final = logging.getLogger("actorserve.console")


def console_address(runtime_dir: Path) -> str:
    """The address at which the coordinator of this runtime folder serves consoles."""
    return f"ipc://{runtime_dir}/{CONSOLE_SOCKET}"


class Caller(NamedTuple):
    """Who sent a command: the name that the audit file gets, and what it may do."""

    name: str
    role: OperatorRole


class Callers(Protocol):
    """Knows the callers of a socket."""

    def secure(self, socket: "zmq.Socket[bytes]") -> None:
        """Set what the server's side of the connection needs, before it is bound."""
        ...

    def identify(self, user_id: str) -> Caller | None:
        """The caller whom ZAP called ``user_id``; None for a caller that may do nothing (any more)."""
        ...

    def close(self) -> None:
        """Release what ``secure`` has made, before the socket is closed."""
        ...


class LocalCallers:
    """The callers of a socket in a folder that only the server's own user may enter: all are operators."""

    def secure(self, socket: "zmq.Socket[bytes]") -> None:
        """The folder's mode is enough."""

    def identify(self, user_id: str) -> Caller | None:
        return Caller("local", OperatorRole.OPERATOR)

    def close(self) -> None:
        """There is nothing to release."""


@dataclass(slots=True)
class _Connection:
    """One console: its name in the core, and the commands that it may still send at once."""

    peer: Peer
    allowance: float
    at: float


class ConsoleServer:
    """Receives commands and sends answers, on the thread of a running event loop. It never blocks.

    A console that does not read its answers is dropped with a line in the log, and one that sends too many commands has
    the excess dropped. Raises: ActorserveError if the address cannot be bound.
    """

    def __init__(self, address: str, callers: Callers | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._callers = callers or LocalCallers()
        self._counter = FrameCounter("console", self._loop.time)
        self._connections: OrderedDict[bytes, _Connection] = OrderedDict()  # by routing id, the latest used last
        self._routes: dict[Peer, bytes] = {}
        self._num_connections = 0
        self._callback: Callable[[], None] | None = None
        self._may_have_arrived = True  # the descriptor signals only new arrivals, so this is kept until all are read
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # otherwise an answer to a full queue is dropped silently
        self._socket.setsockopt(zmq.SNDHWM, _UNREAD_ANSWERS)
        self._socket.setsockopt(zmq.RCVHWM, _READ_BATCH)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_COMMAND_BYTES)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        try:
            self._callers.secure(self._socket)
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._callers.close()
            self._socket.close(0)
            self._context.term()
            raise ActorserveError(f"operators' consoles cannot connect at {address}: {error.strerror}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._fd = self._socket.fileno()

    @property
    def counts(self) -> Counter[str]:
        """How many frames were dropped, for each reason (``dropped: ...``)."""
        return self._counter.counts

    def on_arrival(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when a command may have arrived."""
        self._callback = callback
        self._loop.add_reader(self._fd, self._announce)
        callback()

    def take(self, limit: int = _READ_BATCH) -> list[tuple[Peer, Caller, Command]]:
        """Up to ``limit`` commands, with the name of the console in the core, and its caller. The rest is announced."""
        taken: list[tuple[Peer, Caller, Command]] = []
        if not self._may_have_arrived:
            return taken
        self._may_have_arrived = False
        for _ in range(limit):
            if not self._has_arrived():
                return taken
            received = self._receive()
            if received is not None:
                taken.append(received)
        self._loop.call_soon(self._announce)
        return taken

    def send(self, peer: Peer, answer: Answer) -> bool:
        """Answer a console. False if it is gone, or was dropped because it does not read."""
        routing_id = self._routes.get(peer)
        if routing_id is None:
            return False
        try:
            self._socket.send_multipart([routing_id, encode(answer)], zmq.NOBLOCK)
        except zmq.Again:
            _log.warning("%s %d does not read its answers, and is dropped", peer.name, peer.incarnation)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        else:
            if self._has_arrived():
                self._announce()  # sending has used up the descriptor's signal
            return True
        self._forget(routing_id)
        return False

    def close(self) -> None:
        """Release the socket. Closing again does nothing."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._callers.close()
            self._socket.close(0)
            self._context.term()

    def _has_arrived(self) -> bool:
        return not self._socket.closed and bool(int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)

    def _announce(self) -> None:
        self._may_have_arrived = True
        if self._callback is not None and not self._socket.closed:
            self._callback()

    def _receive(self) -> tuple[Peer, Caller, Command] | None:
        try:
            routing_id, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        caller = self._callers.identify(_user_id(routing_id))
        connection = self._connection(bytes(routing_id.buffer), caller)
        if caller is None:
            self._counter.drop("unknown caller", "its key is not accepted")
            return None
        if connection.allowance < 1.0:
            self._counter.drop("flood", f"{connection.peer.name}: more than {COMMANDS_PER_S:.0f} commands a second")
            return None
        connection.allowance -= 1.0
        if len(frames) != 1:
            self._counter.drop("malformed command", f"{len(frames)} frames")
            return None
        try:
            message: Message = decode(frames[0].buffer)
        except ProtocolError as error:
            self._counter.drop("malformed command", str(error))
            return None
        if not isinstance(message, Command):
            self._counter.drop("malformed command", type(message).__name__)
            return None
        return connection.peer, caller, message

    def _connection(self, routing_id: bytes, caller: Caller | None) -> _Connection:
        now = self._loop.time()
        name = f"{CALLER_PREFIX}{'' if caller is None else caller.name}"
        connection = self._connections.get(routing_id)
        if connection is None or connection.peer.name != name:
            self._forget(routing_id)
            self._num_connections += 1
            connection = _Connection(Peer(name, self._num_connections), _BURST, now)
            self._connections[routing_id] = connection
            self._routes[connection.peer] = routing_id
            if len(self._connections) > MAX_CONSOLES:
                self._forget(next(iter(self._connections)))
        self._connections.move_to_end(routing_id)
        connection.allowance = min(_BURST, connection.allowance + (now - connection.at) * COMMANDS_PER_S)
        connection.at = now
        return connection

    def _forget(self, routing_id: bytes) -> None:
        connection = self._connections.pop(routing_id, None)
        if connection is not None:
            self._routes.pop(connection.peer, None)


def _user_id(frame: zmq.Frame) -> str:
    """What ZAP called the sender; empty without ZAP."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


class ConsoleKeys(NamedTuple):
    """The key pair of an operator or viewer, and the server's public key, each in Z85."""

    public_key: str
    secret_key: str
    server_key: str


class ConsoleClient:
    """A console's side: it sends one command at a time, and waits for the answer. Use it on one thread.

    Raises: ActorserveError if the address or a key cannot be used.
    """

    def __init__(self, address: str, keys: ConsoleKeys | None = None) -> None:
        self.address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        try:
            if keys is not None:
                self._socket.curve_publickey = keys.public_key.encode()
                self._socket.curve_secretkey = keys.secret_key.encode()
                self._socket.curve_serverkey = keys.server_key.encode()
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ActorserveError(f"cannot connect to {address}: {error.strerror}") from None

    def ask(self, command: Command, timeout_s: float) -> Answer | None:
        """The answer; None if none has come in time. The same command may be asked again: no act is done twice."""
        until_s = time.monotonic() + timeout_s
        # ZeroMQ gives a connection up for good that the server refused, and would then wait for another one.
        if not self._socket.poll(1 + int(timeout_s * 1000.0), zmq.POLLOUT):
            return None
        self._socket.send(encode(command), zmq.NOBLOCK)
        while (left_s := until_s - time.monotonic()) > 0 and self._socket.poll(1 + int(left_s * 1000.0)):
            try:
                message = decode(self._socket.recv())
            except ProtocolError as error:
                raise ActorserveError(f"{self.address} sent no answer of this version: {error}") from None
            if isinstance(message, Answer) and message.command_id == command.command_id:
                return message
        return None

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.close(0)
            self._context.term()

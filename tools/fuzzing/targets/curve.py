"""Connections that do not get in: without a key, with a wrong one, and handshakes of CURVE that break in the middle."""

import random
import socket
from contextlib import suppress
from typing import Final

import zmq

from actorserve.wire.curve.key_files import make_key_pair
from actorserve.wire.curve.sockets import connect_with_curve
from actorserve.wire.trust import KeyPair
from tools.fuzzing.errors import BrokenServerError, FuzzError
from tools.fuzzing.mutations import mutated, random_bytes
from tools.fuzzing.targets.target import Place, Recent, hang_up

GREETING: Final = b"\xff" + b"\x00" * 8 + b"\x7f\x03\x01CURVE" + b"\x00" * 47
"""With which ZMTP 3.1 begins; one bit more says that it is of a server."""
_AS_SERVER_AT: Final = 32
_HELLO_BYTES: Final = 202
_COMMANDS: Final = (b"\x05HELLO", b"\x07WELCOME", b"\x08INITIATE", b"\x05READY", b"\x07MESSAGE", b"\x05ERROR")
_ANSWER_S: Final = 0.2
_WHOLE_SHARE: Final = 0.1  # of the connections, because ZeroMQ needs some milliseconds for each
_WAIT_MS: Final = 20


class CurveTarget:
    """The ROUTERs at ``places``, which hold the keys of ``host``."""

    def __init__(self, places: list[Place], host: KeyPair) -> None:
        self.name = "CURVE"
        self._places = places
        self._host = host
        self._stranger = make_key_pair()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._hello = genuine_hello(self._context, self._stranger, host.public_key)

    def send(self, dice: random.Random, count: int, recent: Recent) -> None:
        """Raises: BrokenServerError if a socket accepts no connection."""
        for _ in range(count):
            place = dice.choice(self._places)
            if dice.random() < _WHOLE_SHARE:
                self._connect(place, dice, recent)
            else:
                self._break_off(place, dice, recent)

    def close(self) -> None:
        self._context.term()

    def _connect(self, place: Place, dice: random.Random, recent: Recent) -> None:
        """ZeroMQ's own handshake: without a key, with a stranger's, or for another server."""
        assert isinstance(place.address, tuple)
        host, port = place.address
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            way = dice.choice(("no key", "a stranger's key", "the key of another server"))
            if way == "a stranger's key":
                connect_with_curve(dealer, self._stranger, self._host.public_key)
            elif way != "no key":
                connect_with_curve(dealer, self._host, self._stranger.public_key)
            recent.add(place.name, way.encode())
            dealer.connect(f"tcp://{host}:{port}")
            with suppress(zmq.Again):
                dealer.send(random_bytes(dice), zmq.NOBLOCK)
            dealer.poll(_WAIT_MS)

    def _break_off(self, place: Place, dice: random.Random, recent: Recent) -> None:
        first, second = self._bytes(dice)
        recent.add(place.name, first + second)
        try:
            stream = place.connect()
        except (ConnectionError, TimeoutError) as error:
            raise BrokenServerError(f"{place.name} accepts no connection: {error}") from None
        with suppress(OSError):  # it may hang up first
            stream.settimeout(_ANSWER_S)
            stream.sendall(first)
            if second:
                stream.recv(4096)
                stream.sendall(second)
                stream.recv(4096)
        hang_up(stream, reset=dice.random() < 0.3)

    def _bytes(self, dice: random.Random) -> tuple[bytes, bytes]:
        """What comes first, and what follows once the server has answered."""
        match dice.randrange(7):
            case 0:
                return mutated(GREETING, dice), b""
            case 1:
                return GREETING + mutated(self._hello, dice), b""
            case 2:  # the handshake ends after the server's WELCOME
                return GREETING + self._hello, b""
            case 3:
                return GREETING + self._hello, mutated(_command(b"\x08INITIATE", dice.randbytes(249)), dice)
            case 4:
                return GREETING + self._hello, self._hello
            case 5:  # no handshake, but what comes after it
                return GREETING + _command(b"\x07MESSAGE", dice.randbytes(60)), b""
            case _:
                return GREETING + _command(dice.choice(_COMMANDS), random_bytes(dice)), b""


def genuine_hello(context: "zmq.Context[zmq.Socket[bytes]]", own: KeyPair, server_key: str) -> bytes:
    """The HELLO with which ZeroMQ asks the holder of ``server_key`` for a handshake.

    Raises: FuzzError if none comes.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening, context.socket(zmq.DEALER) as dealer:
        listening.settimeout(10.0)
        dealer.setsockopt(zmq.LINGER, 0)
        connect_with_curve(dealer, own, server_key)
        dealer.connect(f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        stream, _ = listening.accept()
        with stream:
            stream.settimeout(10.0)
            stream.sendall(GREETING[:_AS_SERVER_AT] + b"\x01" + GREETING[_AS_SERVER_AT + 1 :])
            heard = b""
            while len(heard) < len(GREETING) + _HELLO_BYTES:
                part = stream.recv(4096)
                if not part:
                    raise FuzzError("ZeroMQ sends no HELLO")
                heard += part
    return heard[len(GREETING) :]


def _command(name: bytes, rest: bytes) -> bytes:
    body = name + rest
    if len(body) < 256:
        return b"\x04" + bytes([len(body)]) + body
    return b"\x06" + len(body).to_bytes(8, "big") + body

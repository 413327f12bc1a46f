"""What every target is, and connections that do not mind being cut."""

import random
import socket
from collections import deque
from contextlib import suppress
from typing import Final, Protocol

CONNECT_TIMEOUT_S: Final = 10.0
_NUM_RECENT: Final = 2000


class Recent:
    """The last frames, with the names of the sockets that got them."""

    def __init__(self) -> None:
        self.frames: deque[tuple[str, bytes]] = deque(maxlen=_NUM_RECENT)

    def add(self, where: str, frame: bytes) -> None:
        self.frames.append((where, frame))


class Target(Protocol):
    """Some sockets of a server."""

    name: str

    def send(self, dice: random.Random, count: int, recent: Recent) -> None:
        """Send so many frames. Raises: BrokenServerError if a socket does not take them."""
        ...

    def close(self) -> None: ...


class Place:
    """Where a stream socket listens: a path, or a host and a port."""

    def __init__(self, name: str, address: str | tuple[str, int]) -> None:
        self.name = name
        self.address = address

    def connect(self) -> socket.socket:
        """Raises: OSError."""
        family = socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET
        stream = socket.socket(family, socket.SOCK_STREAM)
        stream.settimeout(CONNECT_TIMEOUT_S)
        try:
            stream.connect(self.address)
        except OSError:
            stream.close()
            raise
        return stream


def hang_up(stream: socket.socket, *, reset: bool = False) -> None:
    """Close, and with ``reset`` without a word."""
    with suppress(OSError):
        if reset:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    stream.close()

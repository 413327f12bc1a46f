"""Bytes below the messages: what is no ZeroMQ, and readers of KV that lie."""

import random
import socket
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Final

from actorserve.core.messages import KVTicket, TransferId, TransferKind
from tools.fuzzing.errors import BrokenServerError
from tools.fuzzing.mutations import BOMBS, mutated, random_bytes
from tools.fuzzing.targets.target import Place, Recent, hang_up
from workers.kv_transfer.frames import REQUEST_HEAD, Read, encode_read

_KEPT_OPEN: Final = 40
_GREETING: Final = b"\xff" + b"\x00" * 8 + b"\x7f\x03\x01NULL" + b"\x00" * 48
"""With which ZMTP 3.1 begins."""
_READY: Final = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
_SIGN: Final = b"AKVREAD1"


class StreamTarget(ABC):
    """Connections that send something and hang up, and some that stay."""

    def __init__(self, name: str, places: list[Place]) -> None:
        self.name = name
        self._places = places
        self._kept: list[socket.socket] = []

    def send(self, dice: random.Random, count: int, recent: Recent) -> None:
        """Raises: BrokenServerError if a socket accepts no connection."""
        for _ in range(count):
            place, data = dice.choice(self._places), self.data(dice)
            recent.add(place.name, data)
            try:
                stream = place.connect()
            except (ConnectionError, TimeoutError, FileNotFoundError) as error:
                raise BrokenServerError(f"{place.name} accepts no connection: {error}") from None
            with suppress(OSError):  # it may hang up first
                stream.settimeout(0.2)
                stream.sendall(data)
                if dice.random() < 0.2:
                    stream.shutdown(socket.SHUT_WR)
                    stream.recv(4096)
            if dice.random() < 0.05:
                self._kept.append(stream)
            else:
                hang_up(stream, reset=dice.random() < 0.3)
            if len(self._kept) > _KEPT_OPEN:
                hang_up(self._kept.pop(0), reset=True)
        self.close()

    @abstractmethod
    def data(self, dice: random.Random) -> bytes:
        """What a connection sends."""

    def close(self) -> None:
        for stream in self._kept:
            hang_up(stream)
        self._kept.clear()


class ZmtpTarget(StreamTarget):
    """What is almost ZeroMQ."""

    def data(self, dice: random.Random) -> bytes:
        match dice.randrange(5):
            case 0:
                return random_bytes(dice)
            case 1:
                return mutated(_GREETING, dice)
            case 2:
                return _GREETING + mutated(_READY, dice)
            case 3:
                return _GREETING + _READY + mutated(b"\x02" + b"\x00" * 7 + b"\x20" + b"ASV1" * 8, dice)
            case _:  # a frame of so many bytes that never come
                return (
                    _GREETING
                    + _READY
                    + b"\x02"
                    + dice.choice((b"\xff" * 8, b"\x00\x00\x00\x00\x01\x00\x00\x00"))
                    + b"ASV1"
                )


class KVTarget(StreamTarget):
    """What is almost a request for KV. No ticket is genuine, because the workers keep their key."""

    def data(self, dice: random.Random) -> bytes:
        blocks = tuple(dice.randrange(dice.choice((4, 2**20, 2**63))) for _ in range(dice.choice((0, 1, 3, 200))))
        transfer = TransferId(dice.choice(list(TransferKind)), dice.getrandbits(40))
        ticket = KVTicket(
            transfer, dice.randrange(3), dice.random() < 0.5, blocks, dice.choice(("", "secret", "x" * 200))
        )
        frame = encode_read(Read(ticket, dice.randrange(4), dice.choice((1, 7, 2**40)), dice.random() < 0.5))
        match dice.randrange(7):
            case 0:
                return random_bytes(dice)
            case 1:
                return frame
            case 2:
                return frame[: dice.randrange(len(frame))]
            case 3:
                body = dice.choice(BOMBS)
                return REQUEST_HEAD.pack(_SIGN, len(body)) + body
            case 4:
                return REQUEST_HEAD.pack(_SIGN, dice.choice((0, 1, 2**20, 2**31, 2**32 - 1))) + frame
            case 5:
                body = mutated(frame[REQUEST_HEAD.size :], dice)
                return REQUEST_HEAD.pack(_SIGN, len(body)) + body
            case _:
                return mutated(frame, dice)

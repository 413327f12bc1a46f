"""ZAP: ZeroMQ asks this process whether it accepts the key of each new connection (rfc.zeromq.org/spec/27).

The sockets of one context share one handler, on the event loop. A refused process is told so, and its ZeroMQ closes
the connection for good; ``ZmqTransport`` connects again when it next has something to send.
"""

import asyncio
from typing import Final

import zmq
from zmq.utils import z85

from actorserve.wire.refusals import Refusals
from actorserve.wire.trust import UNKNOWN_KEY, Trust

DOMAIN: Final = b"actorserve"
_ENDPOINT: Final = "inproc://zeromq.zap.01"  # the one name at which ZeroMQ looks for a handler
_VERSION: Final = b"1.0"
_ACCEPTED: Final = b"200"
_REFUSED: Final = b"400"
_BATCH: Final = 64


class ZapHandler:
    """Accepts the connections whose keys ``trust`` knows. Make it before any socket of ``context`` listens.

    Construct and close it on the thread of a running event loop.
    """

    NUM_SOCKETS: Final = 1

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", trust: Trust, refusals: Refusals) -> None:
        self._trust = trust
        self._refusals = refusals
        self._loop = asyncio.get_running_loop()
        self._socket = zap_socket(context)
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._read)

    def close(self) -> None:
        """Answer no more. Closing again does nothing."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(0)

    def _read(self) -> None:
        """Answer the questions that have arrived. The descriptor is edge-triggered, so none may be left unread."""
        for _ in range(_BATCH):
            if self._socket.closed:
                return
            try:
                question = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._socket.send_multipart(zap_answer(question, self._trust, self._refusals))
        self._loop.call_soon(self._read)


def zap_socket(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    """The socket at which ZeroMQ asks; ``zap_answer`` makes the answer to each question."""
    socket = context.socket(zmq.REP)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(_ENDPOINT)
    return socket


def zap_answer(question: list[bytes], trust: Trust, refusals: Refusals) -> list[bytes]:
    """Accept the connection if ``trust`` knows its key."""
    version, number, domain, address, _, mechanism, *credentials = question
    key = ""
    if version == _VERSION and domain == DOMAIN and mechanism == b"CURVE" and len(credentials) == 1:
        key = z85.encode(credentials[0]).decode()
    if key and trust.holder_of(key) is not None:
        return [_VERSION, number, _ACCEPTED, b"", key.encode(), b""]
    refusals.refuse(UNKNOWN_KEY, key, f"a connection from {address.decode(errors='replace')}")
    return [_VERSION, number, _REFUSED, b"", b"", b""]

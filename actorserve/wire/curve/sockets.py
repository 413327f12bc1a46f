"""CURVE on sockets: the options that let a socket accept, or connect to, the holders of certain keys alone."""

from typing import Final

import zmq

from actorserve.wire.curve.zap import DOMAIN
from actorserve.wire.trust import KeyPair

FRAME_OVERHEAD: Final = 33
"""Bytes that CURVE adds to each frame."""

_HANDSHAKE_MS: Final = 10_000  # a connection that is silent for so long is dropped


def serve_with_curve(socket: "zmq.Socket[bytes]", own: KeyPair) -> None:
    """Let ``socket``, before its bind, accept only encrypted connections that the context's ZAP handler accepts."""
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret_key.encode())
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def connect_with_curve(socket: "zmq.Socket[bytes]", own: KeyPair, server_key: str) -> None:
    """Let ``socket``, before its connect, talk only to the holder of ``server_key``, encrypted."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public_key.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret_key.encode())
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)

"""The ZeroMQ transport at the addresses that a cluster's file may have: IPv4, IPv6, and names."""

import asyncio
import socket

import pytest

from actorserve.cluster.network import Place
from actorserve.core.messages import Hello, Peer, Role
from actorserve.wire.zmq_transport import ZmqTransport

_ONE, _OTHER = Peer("alpha/worker-0", 1), Peer("beta/gateway-0", 2)
_HELLO = Hello(1, Role.GATEWAY, "here")


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    "place",
    [
        Place("tcp://127.0.0.1:*", "127.0.0.1"),
        Place("tcp://127.0.0.1:*", "localhost"),
        pytest.param(
            Place("tcp://[::1]:*", "::1"), marks=pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
        ),
    ],
    ids=str,
)
async def test_a_socket_is_reached_at_the_address_that_it_announces(place: Place) -> None:
    """What a process announces leads to its socket, wherever that listens."""
    one, other = ZmqTransport(_ONE, place.bind), ZmqTransport(_OTHER, "tcp://127.0.0.1:*")
    try:
        arrived = asyncio.Event()
        one.on_arrival(arrived.set)
        assert other.connect(_ONE, place.announced(one.address))
        assert other.send(_ONE, _HELLO)
        async with asyncio.timeout(10.0):
            await arrived.wait()
        assert one.take() == [(_OTHER, _HELLO)]
    finally:
        one.close()
        other.close()

"""The hostile handshakes of tools/fuzz, at a process's socket with keys."""

import asyncio
import random
from urllib.parse import urlsplit

import zmq

from actorserve.core.messages import Peer
from actorserve.wire.trust import HostKey, PublicKeys, Trust
from actorserve.wire.zmq_transport import ZmqTransport
from tests.wire.keys import make_pair
from tools.fuzzing.targets.curve import GREETING, CurveTarget, genuine_hello
from tools.fuzzing.targets.target import Place, Recent

HOST = make_pair()
KEYS = PublicKeys({"alpha": HostKey(HOST.public_key)})


def _open() -> tuple[ZmqTransport, Place]:
    transport = ZmqTransport(Peer("alpha/worker-0", 1), "tcp://127.0.0.1:*", trust=Trust(HOST, KEYS))
    port = urlsplit(transport.address).port
    assert port is not None
    return transport, Place("worker-0", ("127.0.0.1", port))


async def test_strangers_and_broken_handshakes_are_refused_in_both_ways() -> None:
    """Some connections end at the check of the key, and others before it; no frame gets in."""
    transport, place = _open()
    target = CurveTarget([place], HOST)
    try:
        await asyncio.to_thread(target.send, random.Random(1), 80, Recent())
        counts = transport.counts
        async with asyncio.timeout(20.0):
            while not {"refused: unknown key", "refused: failed handshake"} <= set(counts):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert counts["received"] == 0
    finally:
        target.close()
        transport.close()


async def test_a_recorded_hello_is_welcome() -> None:
    """What breaks in the middle begins well: the server answers its first step."""
    transport, place = _open()
    try:
        with zmq.Context() as context:
            hello = genuine_hello(context, make_pair(), HOST.public_key)
        with place.connect() as stream:
            stream.sendall(GREETING + hello)
            heard = b""
            while len(heard) < len(GREETING) + 9:
                part = await asyncio.to_thread(stream.recv, 4096)
                assert part
                heard += part
        assert heard[len(GREETING) + 2 :].startswith(b"\x07WELCOME")
    finally:
        transport.close()

"""Encrypted sockets with real handshakes: who gets in, who does not, and how keys change while processes run."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable

import pytest
import zmq

from actorserve.core.messages import Drain, Heartbeat, Hello, Message, Peer, Role
from actorserve.errors import ActorserveError
from actorserve.wire.codec import encode
from actorserve.wire.curve.sockets import connect_with_curve
from actorserve.wire.envelope import make_bundle, make_head
from actorserve.wire.trust import HostKey, KeyPair, PublicKeys, Trust
from actorserve.wire.zmq_transport import ZmqTransport
from tests.wire.keys import make_pair
from tests.wire.recording_relay import RecordingRelay

_DEADLINE_S = 20.0
_ANYWHERE = "tcp://127.0.0.1:*"
C, A, B = Peer("coordinator", 1), Peer("alpha/gateway-0", 1), Peer("beta/worker-0", 1)
ALPHA, BETA, GAMMA, ANN, EVE = (make_pair() for _ in range(5))
HOSTS = {"alpha": HostKey(ALPHA.public_key), "beta": HostKey(BETA.public_key, frozenset({Role.WORKER}))}
KEYS = PublicKeys(HOSTS, {"ann": ANN.public_key}, {"eve": EVE.public_key})
HELLO = Hello(1, Role.WORKER, "here")


class Net:
    """Transports on loopback, and raw sockets that attack them."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._context: zmq.Context[zmq.Socket[bytes]] = self._stack.enter_context(zmq.Context())
        self.trusts: dict[ZmqTransport, Trust] = {}

    def open(self, me: Peer, own: KeyPair, keys: PublicKeys = KEYS, bind: str = _ANYWHERE) -> ZmqTransport:
        trust = Trust(own, keys)
        transport = ZmqTransport(me, bind, trust=trust)
        self._stack.callback(transport.close)
        self.trusts[transport] = trust
        return transport

    def raw(self, address: str, own: KeyPair | None = None, server_key: str = "") -> "zmq.Socket[bytes]":
        socket = self._stack.enter_context(self._context.socket(zmq.DEALER))
        socket.setsockopt(zmq.LINGER, 0)
        if own is not None:
            connect_with_curve(socket, own, server_key)
        socket.connect(address)
        return socket

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    made = Net()
    yield made
    made.close()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_DEADLINE_S):
        while not condition():  # noqa: ASYNC110 -- ZeroMQ's threads change what it looks at
            await asyncio.sleep(0.001)


async def _take(transport: ZmqTransport) -> tuple[Peer, Message]:
    taken: list[tuple[Peer, Message]] = []

    def has_taken() -> bool:
        taken.extend(transport.take(1))
        return bool(taken)

    await _until(has_taken)
    return taken[0]


def _lines(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in message for message in caplog.messages)


async def _works(sender: ZmqTransport, receiver: ZmqTransport) -> None:
    """A message gets through, and all that came before it from others was refused."""
    assert sender.connect(receiver.me, receiver.address)
    assert sender.send(receiver.me, Heartbeat())
    assert await _take(receiver) == (sender.me, Heartbeat())


async def test_an_unknown_key_gets_nothing_through(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    """Frames of a key that the cluster does not have never arrive; the key is logged once, and counted."""
    a, b = net.open(A, ALPHA), net.open(B, BETA)
    net.raw(a.address, GAMMA, ALPHA.public_key).send(make_head(B, A) + encode(HELLO))
    net.raw(a.address, GAMMA, ALPHA.public_key).send(make_head(B, A) + encode(HELLO))
    await _until(lambda: a.counts["refused: unknown key"] == 2)
    await _works(b, a)
    assert a.counts["received"] == 1
    assert (
        _lines(caplog, f"alpha/gateway-0: refused a connection from 127.0.0.1: unknown key ({GAMMA.public_key})") == 1
    )


@pytest.mark.parametrize("own", [None, BETA])
async def test_a_connection_that_does_not_know_our_key_gets_nothing_through(
    net: Net, own: KeyPair | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Without keys, or with a wrong key for us (as when two hosts' keys are swapped), nothing arrives; it is counted
    and logged once.
    """
    a, b = net.open(A, ALPHA), net.open(B, BETA)
    net.raw(a.address, own, BETA.public_key).send(make_head(B, A) + encode(HELLO))
    await _until(lambda: a.counts["refused: failed handshake"] >= 1)
    await _works(b, a)
    assert a.counts["received"] == 1
    assert _lines(caplog, "failed handshake") == 1


async def test_a_host_cannot_take_anothers_name(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    """A frame with the name of another host's process is refused, whatever its message."""
    a, b = net.open(A, ALPHA), net.open(B, BETA)
    raw = net.raw(a.address, BETA, ALPHA.public_key)
    raw.send(make_head(Peer("alpha/worker-0", 1), A) + encode(Heartbeat()))
    raw.send(make_head(C, A) + encode(Drain()))
    raw.send(make_head(Peer("beta/gateway-0", 1), A) + encode(Heartbeat()))
    await _until(lambda: a.counts["refused: role not allowed on the host"] == 2)
    await _works(b, a)
    assert a.counts["refused: another host's name"] == 1
    assert _lines(caplog, "'alpha/worker-0'") == 1


async def test_a_worker_cannot_send_the_coordinators_messages(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    """A message that the sender's role may not send is refused."""
    a, b = net.open(A, ALPHA), net.open(B, BETA)
    assert b.connect(A, a.address)
    assert b.send(A, Drain())
    await _works(b, a)
    assert a.counts["refused: message not allowed for the role"] == 1
    assert _lines(caplog, "refused Drain of beta/worker-0") == 1


async def test_every_message_of_a_bundle_is_checked(net: Net) -> None:
    """Of a bundle, messages that the role may not send are refused, and the others arrive; a bundle in another host's
    name is refused whole.
    """
    a, b = net.open(A, ALPHA), net.open(B, BETA)
    raw = net.raw(a.address, BETA, ALPHA.public_key)
    messages = [encode(message) for message in (Heartbeat(), Drain(), HELLO)]
    raw.send(make_bundle(make_head(Peer("alpha/worker-0", 1), A), messages))
    raw.send(make_bundle(make_head(B, A), messages))
    assert [await _take(a), await _take(a)] == [(B, Heartbeat()), (B, HELLO)]
    await _works(b, a)
    assert a.counts["refused: another host's name"] == 1
    assert a.counts["refused: message not allowed for the role"] == 1
    assert a.counts["received"] == 3


@pytest.mark.parametrize(("own", "name"), [(ANN, "ann"), (EVE, "eve")])
async def test_operators_and_viewers_send_no_messages_of_processes(net: Net, own: KeyPair, name: str) -> None:
    """An operator's or viewer's key may connect, and none of the cluster's messages is taken from it."""
    a, b = net.open(A, ALPHA), net.open(B, BETA)
    raw = net.raw(a.address, own, ALPHA.public_key)
    for sender in (C, Peer(f"{name}/worker-0", 1)):
        for message in (HELLO, Drain()):
            raw.send(make_head(sender, A) + encode(message))
    await _until(lambda: a.counts["refused: not a host's key"] == 4)
    await _works(b, a)


async def test_a_removed_key_is_out_at_once(net: Net) -> None:
    """The next frame on an open connection is refused when its key was removed, and we send nothing there any more."""
    a, b = net.open(A, ALPHA), net.open(B, BETA)
    await _works(b, a)
    await _works(a, b)
    net.trusts[a].replace(PublicKeys({"alpha": HOSTS["alpha"]}))
    assert b.send(A, Heartbeat())
    await _until(lambda: a.counts["refused: unknown key"] == 1)
    assert not a.send(B, Heartbeat())
    assert not a.connect(B, b.address)
    assert a.counts["dropped: no key"] == 1
    assert a.take() == []


async def test_an_added_key_is_in_without_a_restart(net: Net) -> None:
    """A process whose key was refused gets through once its key is added, on the link that it has."""
    a, b = net.open(A, ALPHA, PublicKeys({"alpha": HOSTS["alpha"]})), net.open(B, BETA)
    assert b.connect(A, a.address)
    assert b.send(A, Heartbeat())
    await _until(lambda: a.counts["refused: unknown key"] >= 1)
    net.trusts[a].replace(KEYS)
    await _until(lambda: b.send(A, Heartbeat()) and bool(a.take()))


async def test_a_host_with_a_new_key_is_connected_anew(net: Net) -> None:
    """When a host's key was replaced, connections to its old key end, and new ones go to the new key."""
    a, b = net.open(A, ALPHA), net.open(B, BETA)
    await _works(a, b)
    new_keys = PublicKeys({"alpha": HOSTS["alpha"], "beta": HostKey(GAMMA.public_key)})
    net.trusts[a].replace(new_keys)
    assert not a.send(B, Heartbeat())
    address = b.address
    b.close()
    await _works(a, net.open(B, GAMMA, new_keys, address))


async def test_a_peer_that_was_started_without_keys_is_found_later(net: Net) -> None:
    """A connection that failed for good, because the peer had no keys, is made again once the peer has them."""
    a = net.open(A, ALPHA)
    plain = ZmqTransport(B, _ANYWHERE)
    address = plain.address
    assert a.connect(B, address)
    assert a.send(B, Heartbeat())
    socket = a._links[address].socket
    await _until(lambda: not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)  # ZeroMQ has given up
    plain.close()
    b = net.open(B, BETA, bind=address)
    await _works(a, b)


async def test_a_recorded_connection_cannot_be_replayed(net: Net) -> None:
    """The bytes of a connection, sent again on a new one, bring no message: the handshake's keys were for once."""
    a, b = net.open(A, ALPHA), net.open(B, BETA)
    async with RecordingRelay(a.address) as relay:
        assert b.connect(A, relay.address)
        assert b.send(A, Heartbeat())
        assert await _take(a) == (B, Heartbeat())
        await relay.replay()
        await _until(lambda: a.counts["refused: failed handshake"] >= 1)
    await _works(b, a)
    assert a.counts["received"] == 2
    assert b"ASV1" not in relay.recorded


async def test_a_frame_for_an_earlier_incarnation_stays_out(net: Net) -> None:
    """A trusted host's frames that were sent again reach no later incarnation of their target."""
    a, b = net.open(A, ALPHA), net.open(B, BETA)
    raw = net.raw(a.address, BETA, ALPHA.public_key)
    a.reincarnate(2)
    for _ in range(3):
        raw.send(make_head(B, A) + encode(Heartbeat()))
    await _until(lambda: a.counts["dropped: wrong target"] == 3)
    assert b.connect(a.me, a.address)
    await _works(b, a)


async def test_a_flood_of_bad_handshakes_does_not_stop_service(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    """While strangers connect, with and without keys, messages still arrive, and few lines are logged."""
    a, b = net.open(A, ALPHA), net.open(B, BETA)
    kinds = itertools.cycle([(None, ""), (GAMMA, ALPHA.public_key), (GAMMA, BETA.public_key)])
    for own, server_key in itertools.islice(kinds, 60):
        net.raw(a.address, own, server_key).send(b"x" * 1000)
    host, port = a.address.removeprefix("tcp://").split(":")
    for _ in range(60):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 200)
        writer.close()
    assert b.connect(A, a.address)
    for _ in range(200):
        assert b.send(A, Heartbeat())
        assert await _take(a) == (B, Heartbeat())
    await _until(lambda: a.counts["refused: unknown key"] >= 20 and a.counts["refused: failed handshake"] >= 40)
    assert a.counts["received"] == 200
    assert len(caplog.messages) <= 3


async def test_plain_tcp_stays_on_loopback() -> None:
    """Without keys, listening beyond loopback is refused in one line, and so is connecting."""
    with pytest.raises(ActorserveError, match="without keys") as raised:
        ZmqTransport(A, "tcp://0.0.0.0:*")
    assert "\n" not in str(raised.value)
    plain = ZmqTransport(A, _ANYWHERE)
    assert not plain.connect(B, "tcp://192.0.2.1:5000")
    assert plain.counts["dropped: no key"] == 1
    plain.close()


async def test_with_keys_all_addresses_may_be_bound(net: Net) -> None:
    """With keys a process may listen on every address of its host."""
    a, b = net.open(A, ALPHA, bind="tcp://0.0.0.0:*"), net.open(B, BETA)
    assert b.connect(A, f"tcp://127.0.0.1:{a.address.rpartition(':')[2]}")
    assert b.send(A, Heartbeat())
    assert await _take(a) == (B, Heartbeat())

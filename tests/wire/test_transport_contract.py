"""The guarantees of every transport: ZeroMQ over ipc, tcp and encrypted tcp, and the in-memory transport."""

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
import zmq

from actorserve.core.messages import Hello, Message, Peer, Release, RequestSpec, Role, SamplingParams, Start, Unplace
from actorserve.errors import ActorserveError
from actorserve.wire.codec import encode
from actorserve.wire.envelope import MAX_BUNDLE_BYTES, MAX_BUNDLE_MESSAGES, make_bundle, make_head
from actorserve.wire.links import Link
from actorserve.wire.memory_transport import Hub, MemoryTransport
from actorserve.wire.transport import Transport, TransportLimits
from actorserve.wire.trust import HostKey, PublicKeys, Trust
from actorserve.wire.zmq_transport import ZmqTransport
from tests.wire.keys import make_pair

_DEADLINE_S = 10.0
_HELLO = Hello(1, Role.WORKER, "here")


async def receive(transport: Transport) -> tuple[Peer, Message]:
    """Wait for one message."""
    arrived = asyncio.Event()
    transport.on_arrival(arrived.set)
    while not (messages := transport.take(1)):
        await arrived.wait()
        arrived.clear()
    return messages[0]


class Net:
    """Makes transports of one kind, and closes them."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self._folder = folder
        self._hub = Hub()
        self._made: list[Transport] = []
        self._pairs = {host: make_pair() for host in "abc"}
        self._keys = PublicKeys({host: HostKey(pair.public_key) for host, pair in self._pairs.items()})

    def new_address(self, name: str) -> str:
        """An address at which no transport listens yet."""
        if self.kind in ("tcp", "curve"):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                return f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        return f"ipc://{self._folder / name}" if self.kind == "ipc" else f"memory://{name}"

    def open(self, peer: Peer, address: str, limits: TransportLimits | None = None) -> Transport:
        transport: Transport
        if self.kind == "memory":
            transport = MemoryTransport(self._hub, peer, address, asyncio.get_running_loop().time, limits)
        else:
            transport = ZmqTransport(peer, address, limits, self._trust_of(peer))
        self._made.append(transport)
        return transport

    def _trust_of(self, peer: Peer) -> Trust | None:
        return Trust(self._pairs[peer.name[0]], self._keys) if self.kind == "curve" else None

    def close(self) -> None:
        for transport in self._made:
            transport.close()


@pytest.fixture(params=["memory", "ipc", "tcp", "curve"])
async def net(request: pytest.FixtureRequest) -> AsyncIterator[Net]:
    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        made = Net(request.param, Path(folder))
        yield made
        made.close()


async def _take(transport: Transport, number: int = 1) -> list[tuple[Peer, Message]]:
    async with asyncio.timeout(_DEADLINE_S):
        return [await receive(transport) for _ in range(number)]


async def _until(condition: Callable[[], bool], *transports: Transport) -> None:
    """Wait until ``condition`` holds; the transports' readers run meanwhile."""
    async with asyncio.timeout(_DEADLINE_S):
        while not condition():
            for transport in transports:
                transport.take(0)
            await asyncio.sleep(0.001)


_A, _B, _C = (Peer(f"{host}/gateway-0", 1) for host in "abc")


def _pair(net: Net, limits: TransportLimits | None = None) -> tuple[Transport, Transport]:
    a, b = net.open(_A, net.new_address("a"), limits), net.open(_B, net.new_address("b"), limits)
    assert a.connect(_B, b.address)
    assert b.connect(_A, a.address)
    return a, b


async def test_messages_arrive_in_order_with_their_sender(net: Net) -> None:
    """A thousand messages arrive once each, in the order sent, under the sender's name and incarnation."""
    a, b = _pair(net)
    sent: list[Message] = [Unplace(f"r{i}", i) for i in range(1000)]
    for message in sent:
        assert a.send(_B, message)
    assert await _take(b, 1000) == [(_A, message) for message in sent]
    assert b.send(_A, Release("x", 1))
    assert await _take(a) == [(_B, Release("x", 1))]
    assert (a.counts["sent"], b.counts["received"]) == (1000, 1000)


async def test_take_is_bounded_and_loses_nothing(net: Net) -> None:
    """``take`` returns at most ``limit`` messages, and later calls return the rest."""
    a, b = _pair(net)
    for i in range(300):
        a.send(_B, Unplace("r", i))
    await _until(lambda: b.counts["received"] == 300)
    assert [len(b.take(128)) for _ in range(4)] == [128, 128, 44, 0]


async def test_what_a_bounded_take_leaves_is_announced(net: Net) -> None:
    """Waiting for the arrival callback after every take, however small, misses no message and never hangs."""
    a, b = _pair(net)
    arrived = asyncio.Event()
    b.on_arrival(arrived.set)
    for i in range(100):
        a.send(_B, Unplace("r", i))
    taken: list[tuple[Peer, Message]] = []
    async with asyncio.timeout(_DEADLINE_S):
        while len(taken) < 100:
            await arrived.wait()
            arrived.clear()
            taken += b.take(3)
    assert taken == [(_A, Unplace("r", i)) for i in range(100)]
    arrived.clear()
    assert b.take(3) == []
    assert not arrived.is_set()


async def test_a_frame_for_another_incarnation_is_dropped_and_counted(net: Net) -> None:
    """Frames for an older or newer incarnation do not arrive; frames for the current one do."""
    a, b = _pair(net)
    for incarnation in (2, 99):
        assert a.connect(_B._replace(incarnation=incarnation), b.address)
        assert a.send(_B._replace(incarnation=incarnation), Unplace("lost", 1))
    assert a.connect(_C, b.address)
    assert a.send(_C, Unplace("lost", 1))
    assert a.send(_B, Unplace("found", 1))
    assert await _take(b) == [(_A, Unplace("found", 1))]
    assert b.counts["dropped: wrong target"] == 3


async def test_only_hello_may_go_to_any_incarnation(net: Net) -> None:
    """A frame for incarnation 0 reaches any incarnation if it is a Hello, and is dropped otherwise."""
    a, b = _pair(net)
    anyone = _B._replace(incarnation=0)
    assert a.connect(anyone, b.address)
    assert a.send(anyone, Unplace("lost", 1))
    assert a.send(anyone, _HELLO)
    assert await _take(b) == [(_A, _HELLO)]
    assert b.counts["dropped: wrong target"] == 1


async def test_a_restarted_peer_gets_only_its_own_frames(net: Net) -> None:
    """After a restart, frames for the dead incarnation are dropped, and frames for the new one arrive."""
    a, b = _pair(net)
    address = b.address
    a.send(_B, Unplace("seen", 1))
    await _take(b)
    b.close()
    for i in range(10):
        a.send(_B, Unplace("late", i))
    b2 = net.open(_B._replace(incarnation=2), address)
    assert a.connect(_B._replace(incarnation=2), address)
    assert a.send(_B._replace(incarnation=2), Unplace("new", 1))
    assert await _take(b2) == [(_A, Unplace("new", 1))]
    assert b2.counts["received"] == 1


async def test_our_own_new_incarnation_fences_the_old(net: Net) -> None:
    """After ``reincarnate`` we send as the new incarnation, and frames for the old one are dropped."""
    a, b = _pair(net)
    b.reincarnate(5)
    assert b.me == _B._replace(incarnation=5)
    assert b.send(_A, Unplace("r", 1))
    assert await _take(a) == [(_B._replace(incarnation=5), Unplace("r", 1))]
    assert a.connect(_B._replace(incarnation=5), b.address)
    a.send(_B, Unplace("old", 1))
    a.send(_B._replace(incarnation=5), Unplace("new", 1))
    assert await _take(b) == [(_A, Unplace("new", 1))]


async def test_messages_wait_for_a_listener(net: Net) -> None:
    """Messages for an address that is not bound yet wait, and arrive in order once it is."""
    a = net.open(_A, net.new_address("a"))
    address = net.new_address("b")
    assert a.connect(_B, address)
    for i in range(10):
        assert a.send(_B, Unplace("r", i))
    b = net.open(_B, address)
    assert await _take(b, 10) == [(_A, Unplace("r", i)) for i in range(10)]


async def test_sending_to_a_peer_that_is_not_connected_is_refused(net: Net) -> None:
    """Sending before connect or after disconnect gives False and is counted; disconnecting a stranger does nothing."""
    a, b = _pair(net)
    assert not a.send(Peer("stranger", 1), _HELLO)
    a.disconnect(Peer("stranger", 1))
    a.disconnect(_B)
    assert not a.send(_B, _HELLO)
    assert a.counts["dropped: not connected"] == 2
    assert a.connect(_B, b.address)
    assert a.send(_B, _HELLO)
    assert await _take(b) == [(_A, _HELLO)]


async def test_an_oversize_message_is_not_sent(net: Net) -> None:
    """A message over the bound gives False and is counted, and the link goes on."""
    a, b = _pair(net, TransportLimits(max_frame_bytes=2000))
    long = Start(1, RequestSpec("r", tuple(range(5000)), SamplingParams(seed=1, max_tokens=1)))
    assert not a.send(_B, long)
    assert a.counts["dropped: oversize"] == 1
    assert a.send(_B, Unplace("r", 1))
    assert await _take(b) == [(_A, Unplace("r", 1))]


async def test_an_oversize_message_is_not_received(net: Net) -> None:
    """A frame over the receiver's bound never arrives; other senders' messages do."""
    a = net.open(_A, net.new_address("a"))
    b = net.open(_B, net.new_address("b"), TransportLimits(max_frame_bytes=2000))
    c = net.open(_C, net.new_address("c"))
    assert a.connect(_B, b.address)
    assert c.connect(_B, b.address)
    assert a.send(_B, Start(1, RequestSpec("r", tuple(range(5000)), SamplingParams(seed=1, max_tokens=1))))
    assert c.send(_B, Unplace("r", 1))
    assert await _take(b) == [(_C, Unplace("r", 1))]
    assert b.counts["received"] == 1


async def test_a_full_queue_refuses_without_blocking(net: Net) -> None:
    """Without a reader, sends give True until the queue is full, and then False, counted. Accepted messages arrive."""
    a = net.open(_A, net.new_address("a"), TransportLimits(send_queue=20))
    address = net.new_address("b")
    assert a.connect(_B, address)
    results = [a.send(_B, Unplace("r", i)) for i in range(50)]
    accepted = sum(results)
    assert results == [True] * accepted + [False] * (50 - accepted)
    assert 20 <= accepted < 50
    assert a.counts["dropped: queue full"] == 50 - accepted
    b = net.open(_B, address)
    assert await _take(b, accepted) == [(_A, Unplace("r", i)) for i in range(accepted)]


async def test_a_slow_receiver_holds_its_senders_back(net: Net) -> None:
    """If a receiver with a small inbox takes no messages, none of those that the sender could queue is lost."""
    limits = TransportLimits(receive_queue=10)
    a, b = _pair(net, limits)
    for i in range(200):
        assert a.send(_B, Unplace("r", i))
    await _until(lambda: b.counts["received"] >= 10, b)
    assert b.counts["received"] == 10
    assert await _take(b, 200) == [(_A, Unplace("r", i)) for i in range(200)]


async def test_an_unusable_address_is_refused(net: Net) -> None:
    """Connecting to an invalid address gives False and raises nothing."""
    a, _ = _pair(net)
    assert not a.connect(Peer("a/worker-0", 1), "")
    if net.kind != "memory":
        for address in ("gopher://x", "tcp://", "tcp://nowhere", "ipc://" + "x" * 300, "inproc://x"):
            assert not a.connect(Peer("a/worker-0", 1), address)


async def test_an_address_is_bound_once(net: Net) -> None:
    """Listening at an address in use raises. With ipc, the new listener takes the address over, as after a kill."""
    a, _ = _pair(net)
    if net.kind != "ipc":
        with pytest.raises(ActorserveError):
            net.open(_C, a.address)


async def test_closing_again_does_nothing(net: Net) -> None:
    """A closed transport can be closed again, and refuses to send and to connect."""
    a, b = _pair(net)
    a.close()
    a.close()
    assert not a.send(_B, _HELLO)
    assert not a.connect(_B, b.address)
    assert a.take() == []


@pytest.mark.parametrize("net", ["ipc", "tcp"], indirect=True)
async def test_garbage_frames_are_counted_and_ignored(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    """Garbage from a raw ZeroMQ socket and from a raw stream is counted and logged once; good frames still arrive."""
    a, b = _pair(net)
    head = make_head(_A, _B)
    good = encode(Unplace("r", 1))
    garbage: list[list[bytes]] = [
        [b""],
        [b"hello"],
        [b"ASV1\xff\xff"],
        [b"ASV1\x00\x01\xc1" + good],
        [make_head(_A._replace(incarnation=0), _B) + good],
        [head[:-1] + b"\xc3" + good],
        [head],
        [head + b"\x00" * 100],
        [head + good + b"\x00"],
        [head + good, b"another part"],
        [b"x"] * 50,
        [make_bundle(head, [good, good])[:-1]],
        [make_bundle(head, [good]) + b"\0\0"],
        [make_bundle(head, [good] * (MAX_BUNDLE_MESSAGES + 1))],
        [make_bundle(head, [b"", b"\xc3"])],
    ]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(b.address)
        for parts in garbage:
            raw.send_multipart(parts)
        if net.kind == "ipc":
            stream = socket.socket(socket.AF_UNIX)
            stream.connect(b.address.removeprefix("ipc://"))
        else:
            stream = socket.create_connection(("127.0.0.1", int(b.address.rpartition(":")[2])))
        with stream:
            stream.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 1000)
            # The last bundle holds two messages, and both are none.
            await _until(lambda: sum(n for k, n in b.counts.items() if k.startswith("dropped")) == len(garbage) + 1, b)
    assert b.counts["dropped: malformed envelope"] == 11
    assert b.counts["dropped: malformed message"] == 5
    assert len([record for record in caplog.records if record.name == "actorserve.wire"]) == 1
    assert a.send(_B, Unplace("good", 1))
    assert await _take(b) == [(_A, Unplace("good", 1))]


@pytest.mark.parametrize("net", ["ipc", "tcp", "curve"], indirect=True)
async def test_more_links_than_allowed_are_refused(net: Net) -> None:
    """A link beyond the limit gives False and is counted, earlier links still work, and a closed link makes room."""
    a, b = net.open(_A, net.new_address("a"), TransportLimits(max_links=3)), net.open(_B, net.new_address("b"))
    peers = [Peer(f"a/worker-{number}", 1) for number in range(4)]
    assert a.connect(_B, b.address)
    connected = [a.connect(peer, net.new_address(f"p{peer.name[-1]}")) for peer in peers]
    assert connected == [True, True, False, False]
    assert a.counts["dropped: no socket"] == 2
    assert a.send(_B, _HELLO)
    assert await _take(b) == [(_A, _HELLO)]
    a.disconnect(peers[0])
    await _until(lambda: a.connect(peers[2], net.new_address("again")))


async def test_more_than_a_thousand_links(net: Net) -> None:
    """One process may send to more than a thousand others."""
    a, b = _pair(net)
    for number in range(1100):
        address = f"tcp://127.0.0.1:{20000 + number}" if net.kind in ("tcp", "curve") else net.new_address(f"p{number}")
        assert a.connect(Peer(f"a/worker-{number}", 1), address)
    assert a.send(_B, _HELLO)
    assert await _take(b) == [(_A, _HELLO)]


async def test_a_message_for_several_peers_arrives_at_all(net: Net) -> None:
    """The same message, sent to two peers with other messages in between, arrives unchanged at both."""
    a, b = _pair(net)
    c = net.open(_C, net.new_address("c"))
    assert a.connect(_C, c.address)
    same = Unplace("same", 1)
    for peer in (_B, _C):
        assert a.send(peer, same)
        assert a.send(peer, Unplace("other", 2))
        assert a.send(peer, same)
    for transport in (b, c):
        assert [message for _, message in await _take(transport, 3)] == [same, Unplace("other", 2), same]


def _bundling_pair(net: Net, limits: TransportLimits | None = None) -> tuple[Transport, Transport]:
    a, b = _pair(net, limits)
    assert a.connect(_B, b.address, takes_bundles=True)
    return a, b


async def test_messages_of_one_turn_arrive_in_order(net: Net) -> None:
    """To a peer that takes bundles, too, messages of any size and number arrive once each, in the order sent."""
    a, b = _bundling_pair(net)
    long = "x" * 1000
    sent: list[Message] = [Unplace(long if i % 3 else "r", i) for i in range(2000)]
    for turn in range(4):
        for message in sent[turn * 500 : (turn + 1) * 500]:
            assert a.send(_B, message)
        await asyncio.sleep(0)
    assert await _take(b, 2000) == [(_A, message) for message in sent]
    assert (a.counts["sent"], b.counts["received"]) == (2000, 2000)


async def test_what_waits_leaves_before_a_link_ends(net: Net) -> None:
    """Messages that were sent before a disconnect or a close arrive."""
    a, b = _pair(net)
    for end in (partial(a.disconnect, _B), a.close):
        assert a.connect(_B, b.address, takes_bundles=True)
        assert a.send(_B, _HELLO)
        assert await _take(b) == [(_A, _HELLO)], "the connection stands"
        for i in range(3):
            assert a.send(_B, Unplace("r", i))
        end()
        assert await _take(b, 3) == [(_A, Unplace("r", i)) for i in range(3)]


async def test_what_waits_is_of_the_incarnation_that_sent_it(net: Net) -> None:
    """Messages that were sent before a rejoin come from the old incarnation, and later ones from the new."""
    a, b = _bundling_pair(net)
    for i in range(3):
        assert a.send(_B, Unplace("old", i))
    a.reincarnate(7)
    for i in range(3):
        assert a.send(_B, Unplace("new", i))
    new = _A._replace(incarnation=7)
    expected = [(_A, Unplace("old", i)) for i in range(3)] + [(new, Unplace("new", i)) for i in range(3)]
    assert await _take(b, 6) == expected


@pytest.mark.parametrize("net", ["ipc", "tcp", "curve"], indirect=True)
async def test_messages_that_wait_are_counted_when_the_queue_is_full(net: Net) -> None:
    """What finds a full queue at the end of the turn is lost and counted; the rest arrives."""
    a = net.open(_A, net.new_address("a"), TransportLimits(send_queue=2))
    address = net.new_address("b")
    assert a.connect(_B, address, takes_bundles=True)
    while not a.counts["dropped: queue full"]:
        a.send(_B, Unplace("first of its turn", 1))
        assert a.send(_B, Unplace("waits", 1))
        assert a.send(_B, Unplace("waits", 2))
        await asyncio.sleep(0)
    assert a.counts["dropped: queue full"] in (2, 3)
    b = net.open(_B, address)
    assert len(await _take(b, a.counts["sent"])) == a.counts["sent"]


@pytest.mark.parametrize(("takes_bundles", "num_frames"), [(False, 1000), (True, 5)])
async def test_only_peers_that_take_bundles_get_them(
    net: Net, monkeypatch: pytest.MonkeyPatch, takes_bundles: bool, num_frames: int
) -> None:
    """A thousand messages of one turn are a thousand frames, or one and then full bundles."""
    a = net.open(_A, net.new_address("a"))
    frames: list[bytes] = []

    def put(link: Link, frame: bytes) -> bool:
        frames.append(frame)
        return True

    monkeypatch.setattr(a, "_put", put)
    assert a.connect(_B, net.new_address("b"), takes_bundles=takes_bundles)
    for i in range(1000):
        assert a.send(_B, Unplace("r", i))
    await asyncio.sleep(0)
    assert len(frames) == (1000 if net.kind == "memory" else num_frames)
    assert max(map(len, frames)) <= MAX_BUNDLE_BYTES

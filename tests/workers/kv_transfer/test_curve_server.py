"""KV over encrypted sockets: only hosts with workers read it, and whatever a reader sends, others are served."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import zmq

from actorserve.core.effects import Fetch
from actorserve.core.messages import KVTicket, Peer, Role
from actorserve.errors import ActorserveError
from actorserve.wire.curve.sockets import connect_with_curve
from actorserve.wire.trust import HostKey, KeyPair, PublicKeys, Trust
from tests.e2e.server import wait_until
from tests.wire.keys import make_pair
from tests.workers.kv_source import HERE, KEY, KEYS, THERE, content, held, make_pools, ticket_for
from workers.kv_transfer.cancellation import Cancellation
from workers.kv_transfer.curve.client import CurveClient
from workers.kv_transfer.curve.server import NEXT, CurveServer
from workers.kv_transfer.errors import TransferError
from workers.kv_transfer.frames import Read, encode_read
from workers.kv_transfer.transfer import KVTransfer

SOURCE = Peer("there/worker-0", 7)
OPERATOR, GATEWAY_HOST, STRANGER = make_pair(), make_pair(), make_pair()
MORE_KEYS = PublicKeys(
    {**KEYS.hosts, "edge": HostKey(GATEWAY_HOST.public_key, frozenset({Role.GATEWAY}))}, {"ann": OPERATOR.public_key}
)


@contextmanager
def serving(keys: PublicKeys = MORE_KEYS) -> Iterator[tuple[KVTransfer, Trust]]:
    """A source with keys, and its trust."""
    trust = Trust(THERE, keys)
    source = KVTransfer(make_pools(), "tcp://127.0.0.1:*", KEY, trust=trust)
    try:
        yield source, trust
    finally:
        source.close()


@contextmanager
def reading(own: KeyPair = HERE, keys: PublicKeys = MORE_KEYS, patience_s: float = 5.0) -> Iterator[KVTransfer]:
    """A destination with other contents."""
    trust = Trust(own, keys)
    destination = KVTransfer(make_pools(10), "tcp://127.0.0.1:*", b"another key", patience_s=patience_s, trust=trust)
    try:
        yield destination
    finally:
        destination.close()


def fetch_of(source: KVTransfer, ticket: KVTicket | None = None, num_blocks: int = 1) -> Fetch:
    blocks = tuple(range(num_blocks))
    access = replace(source.access, host="another host")
    return Fetch(1, SOURCE, access, ticket or ticket_for(blocks), 0, blocks, is_urgent=False)


def dropped(source: KVTransfer) -> dict[str, int]:
    server = source._server
    assert isinstance(server, CurveServer)
    return server.dropped


def test_one_connection_serves_many_reads() -> None:
    """Reads after one another use the same encrypted connection, and bring the source's bytes."""
    with serving() as (source, _), reading() as destination:
        for _ in range(3):
            destination.fetch(fetch_of(source, num_blocks=300))
        (link,) = [kept.link for kept in destination._held.values()]
        assert isinstance(link, CurveClient)
        assert np.array_equal(held(destination._pools)[:300], content(400, 0)[:300])
        assert dropped(source) == {}


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (STRANGER, "refused: unknown key"),
        (OPERATOR, "refused: key of no host with workers"),
        (GATEWAY_HOST, "refused: key of no host with workers"),
    ],
)
def test_only_hosts_with_workers_read(own: KeyPair, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """A stranger, an operator and a host without workers get nothing, with a genuine ticket, too; it is counted, and
    logged once.
    """
    with serving() as (source, _), reading(own, patience_s=0.5) as destination:
        with pytest.raises(TransferError, match="sent nothing for"):
            destination.fetch(fetch_of(source))
        wait_until(lambda: dropped(source).get(reason, 0) >= 1, reason)
        with reading() as other:
            other.fetch(fetch_of(source))
    assert sum(own.public_key in line for line in caplog.messages) == 1


def test_a_reader_without_our_key_gets_nothing() -> None:
    """A reader that believes another key to be the source's (as when two hosts' keys are swapped), or that has no keys
    at all, does not get through; it is counted.
    """
    swapped = PublicKeys({"here": HostKey(THERE.public_key), "there": HostKey(HERE.public_key)})
    with serving() as (source, _), reading(THERE, swapped, patience_s=0.5) as destination:
        with pytest.raises(TransferError, match="sent nothing for"):
            destination.fetch(fetch_of(source))
        wait_until(lambda: dropped(source).get("refused: failed handshake", 0) >= 1, "a failed handshake")


def test_a_removed_key_is_out_in_the_middle_of_a_read() -> None:
    """Once a host's key is removed, it gets no further chunk, and no further read."""
    with serving() as (source, trust), reading(patience_s=0.5) as destination:

        def remove() -> None:
            trust.replace(replace(MORE_KEYS, hosts={"there": MORE_KEYS.hosts["there"]}))

        server = source._server
        assert isinstance(server, CurveServer)
        send_chunk, num_sent = server._send_chunk, 0

        def send_once(*arguments: object) -> None:
            nonlocal num_sent
            num_sent += 1
            send_chunk(*arguments)  # type: ignore[arg-type]
            remove()

        server._send_chunk = send_once  # type: ignore[method-assign,assignment]
        with pytest.raises(TransferError, match="sent nothing for"):
            destination.fetch(fetch_of(source, num_blocks=400))
        assert num_sent == 1
        assert dropped(source)["refused: unknown key"] + dropped(source)["refused: key of no host with workers"] >= 1


def test_a_source_whose_key_was_removed_is_not_read() -> None:
    """The reader, too, follows its keys: it sends nothing to a host that is out."""
    with serving() as (source, _), reading() as destination:
        destination.fetch(fetch_of(source))
        trust = destination._trust
        assert trust is not None
        trust.replace(replace(MORE_KEYS, hosts={"here": MORE_KEYS.hosts["here"]}))
        with pytest.raises(TransferError, match="the key of the host of there/worker-0 is not accepted any more"):
            destination.fetch(fetch_of(source))
        with pytest.raises(TransferError, match="the cluster has no key of the host of 'there/worker-0'"):
            destination.fetch(fetch_of(source))


def test_a_source_with_another_key_is_given_up() -> None:
    """A source that has started again with another key, at the same address, ends the read in time, and no thread waits
    for ever.
    """
    with reading(patience_s=0.5) as destination:
        with serving() as (source, _):
            destination.fetch(fetch_of(source))
            fetch = fetch_of(source)
        port = fetch.access.address.rpartition(":")[2]
        other = Trust(STRANGER, replace(KEYS, hosts={**KEYS.hosts, "there": HostKey(STRANGER.public_key)}))
        again = KVTransfer(make_pools(), f"tcp://127.0.0.1:{port}", KEY, trust=other)
        for _ in range(3):
            with pytest.raises(TransferError, match="sent nothing for"):
                destination.fetch(replace(fetch, ticket=ticket_for((0,))))
        again.close()


def test_a_ticket_counts_once_and_must_be_genuine() -> None:
    """A ticket that was used before, or made by another process, is refused with a reason."""
    with serving() as (source, _), reading() as destination:
        ticket = ticket_for((0,))
        destination.fetch(fetch_of(source, ticket))
        with pytest.raises(TransferError, match="refused: the ticket was used before"):
            destination.fetch(fetch_of(source, ticket))
        with pytest.raises(TransferError, match="refused: the ticket is not genuine"):
            destination.fetch(fetch_of(source, replace(ticket_for((0,)), secret="x")))


def _whole(ticket: KVTicket) -> bytes:
    return encode_read(Read(ticket, 0, 1, with_checksum=False))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b""], "the request is incomplete"),
        ([b"AKVREAD1\0\0\0\1"], "the request has another length than it says"),
        ([b"x" * 100], "not a request for KV"),
        ([b"AKVREAD1\xff\xff\xff\xff"], "the request is too long"),
        ([_whole(ticket_for((0,)))[:-5]], "the request has another length than it says"),
        ([_whole(ticket_for((10**9,)))], "the ticket names blocks beyond the pool"),
        ([b"a", b"b"], "a message of several frames"),
    ],
)
def test_garbage_is_counted_and_others_are_served(frames: list[bytes], reason: str) -> None:
    """Frames of a trusted host that are no request change nothing for other readers."""
    with serving() as (source, _), zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        connect_with_curve(raw, HERE, THERE.public_key)
        raw.connect(source.access.address)
        raw.send_multipart(frames)
        raw.send(NEXT)  # without a read
        wait_until(lambda: dropped(source).get(reason, 0) == 1, reason)
        with reading() as destination:
            destination.fetch(fetch_of(source))


def test_a_reader_that_gives_up_makes_way_while_an_iteration_computes() -> None:
    """It keeps no place among the readers, although the iteration whose KV it waited for gets no further."""
    with serving() as (source, _), reading() as destination:
        server, cancellation, errors = source._server, Cancellation(), list[TransferError]()
        assert isinstance(server, CurveServer)

        def read() -> None:
            try:
                destination.fetch(fetch_of(source, ticket_for((0,), step_id=5)), cancellation)
            except TransferError as error:
                errors.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        wait_until(lambda: any(found.num_asked for found in list(server._readings.values())), "a reader that waits")
        cancellation.cancel("not wanted")
        thread.join()
        assert [str(error) for error in errors] == ["not wanted"]
        wait_until(lambda: not server._readings, "no reader")
        assert dropped(source) == {}


def test_a_flood_of_readers_does_not_stop_service() -> None:
    """While strangers connect and a trusted reader asks without end, others are served."""
    with serving() as (source, _), zmq.Context() as context:
        sockets = []
        for own in [STRANGER] * 30 + [HERE] * 30:
            raw = context.socket(zmq.DEALER)
            raw.setsockopt(zmq.LINGER, 0)
            connect_with_curve(raw, own, THERE.public_key)
            raw.connect(source.access.address)
            raw.send(_whole(ticket_for(tuple(range(100)))))
            for _ in range(500):
                raw.send(NEXT)
            sockets.append(raw)
        began_s = time.monotonic()
        with reading(patience_s=30.0) as destination:
            destination.fetch(fetch_of(source))
        assert time.monotonic() - began_s < 30.0
        for raw in sockets:
            raw.close(0)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: CurveServer(make_pools(), "tcp://*:*", KEY, Trust(THERE, KEYS)), "expected a host to announce"),
        (lambda: CurveServer(make_pools(), "tcp://192.0.2.1:*", KEY, Trust(THERE, KEYS)), "cannot serve KV at"),
        (lambda: KVTransfer(make_pools(), "tcp://0.0.0.0:*", KEY, announced_host="localhost"), "without keys"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_line(make: Callable[[], object], reason: str) -> None:
    """An address without a host, of another machine, or beyond loopback without keys."""
    with pytest.raises(ActorserveError, match=reason) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_without_keys_no_kv_is_read_from_other_machines() -> None:
    """A worker without keys connects to loopback alone."""
    destination = KVTransfer(make_pools(10), "tcp://127.0.0.1:*", KEY)
    with serving() as (source, _):
        fetch = fetch_of(source)
        elsewhere = replace(fetch, access=replace(fetch.access, address="tcp://192.0.2.1:5000"))
        with pytest.raises(TransferError, match="without keys"):
            destination.fetch(elsewhere)
    destination.close()

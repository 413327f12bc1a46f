"""The data sockets against peers that break the protocol."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import msgpack
import numpy as np
import pytest
from hypothesis import given, strategies as st

from actorserve.core.effects import Fetch
from actorserve.core.messages import KVAccess, Peer
from actorserve.errors import ActorserveError, ProtocolError
from tests.workers.kv_source import KEY, NUM_BLOCKS, content, held, make_pools, ticket_for
from workers.kv_transfer.cancellation import Cancellation
from workers.kv_transfer.data_server import DataServer
from workers.kv_transfer.errors import TransferError
from workers.kv_transfer.frames import (
    ANSWER_HEAD,
    REQUEST_HEAD,
    Granted,
    Read,
    Refused,
    decode_answer,
    decode_read,
    encode_granted,
    encode_read,
    encode_refused,
    request_bytes,
)
from workers.kv_transfer.transfer import KVTransfer

DEADLINE_S = 10.0
SOURCE = Peer("source", 1)
ALL = Read(ticket_for(range(NUM_BLOCKS)), 0, 64, with_checksum=False)


@contextmanager
def serving(
    bind: str, request_s: float = 60.0, silence_s: float = 3600.0, patience_s: float = 60.0
) -> Iterator[DataServer]:
    server = DataServer(make_pools(), bind, KEY, request_s=request_s, silence_s=silence_s, patience_s=patience_s)
    yield server
    server.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DataServer]:
    with serving(f"ipc://{tmp_path}/kv") as server:
        yield server


@contextmanager
def reader(server: DataServer, *requests: bytes) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(DEADLINE_S)
        stream.connect(server.address.removeprefix("ipc://"))
        for part in requests:
            stream.sendall(part)
        yield stream


def received(stream: socket.socket) -> bytes:
    """All bytes until the server hangs up."""
    parts = []
    with suppress(ConnectionResetError):  # the server did not read all of the request
        while part := stream.recv(2**20):
            parts.append(part)
    return b"".join(parts)


def expect_served(server: DataServer) -> None:
    with reader(server, encode_read(replace(ALL, ticket=ticket_for((7,)), with_checksum=True))) as stream:
        block = content(NUM_BLOCKS, 0)[7].tobytes()
        assert received(stream) == encode_granted(by_piece=False) + crc32(block).to_bytes(4) + block


def expect_dropped(server: DataServer, reason: str, num_times: int) -> None:
    """Wait until the server has dropped ``num_times`` requests for ``reason``, and none for other reasons."""
    until = time.monotonic() + DEADLINE_S
    while server.dropped[reason] < num_times:
        assert time.monotonic() < until, server.dropped
        threading.Event().wait(0.01)
    assert server.dropped == {reason: num_times}


def test_a_stalled_reader_delays_no_other(server: DataServer) -> None:
    """Other readers are served while one reads nothing; that one gets all of its blocks when it continues."""
    with reader(server, encode_read(replace(ALL, ticket=ticket_for(range(NUM_BLOCKS))))) as slow:
        for _ in range(3):
            expect_served(server)
        body = received(slow)[ANSWER_HEAD.size :]
    chunks = np.split(content(NUM_BLOCKS, 0), range(64, NUM_BLOCKS, 64))
    assert body == b"".join(chunk.transpose(1, 0, 2).tobytes() for chunk in chunks)


def test_a_stalled_reader_is_dropped(tmp_path: Path) -> None:
    """The connection of a reader that reads nothing for ``silence_s`` is closed in the middle of the answer."""
    said = encode_read(replace(ALL, ticket=ticket_for(range(NUM_BLOCKS))))
    with serving(f"ipc://{tmp_path}/kv", silence_s=0.2) as server, reader(server, said) as stream:
        expect_dropped(server, "the reader stalled", 1)
        assert 0 < len(received(stream)) < content(NUM_BLOCKS, 0).nbytes


def test_an_iteration_that_is_stuck_is_not_its_readers_fault(tmp_path: Path) -> None:
    """A reader that waits for KV of an iteration that gets no further is dropped for that reason."""
    said = encode_read(replace(ALL, ticket=ticket_for(range(NUM_BLOCKS), step_id=5)))
    with serving(f"ipc://{tmp_path}/kv", patience_s=0.2) as server, reader(server, said) as stream:
        expect_dropped(server, "the source's iteration has got no further for 0.2 s", 1)
        assert received(stream) == encode_granted(by_piece=True)


def test_a_reader_that_gives_up_makes_way_while_an_iteration_computes(tmp_path: Path) -> None:
    """It keeps no place among the readers until the iteration whose KV it waited for gets on."""
    said = encode_read(replace(ALL, ticket=ticket_for(range(NUM_BLOCKS), step_id=5)))
    with serving(f"ipc://{tmp_path}/kv") as server:
        with reader(server, said) as stream:
            assert stream.recv(ANSWER_HEAD.size) == encode_granted(by_piece=True)
        expect_dropped(server, "the reader hung up", 1)


def test_a_server_ends_while_readers_stall(server: DataServer) -> None:
    """``close`` ends connections that send or read nothing, and then no socket listens."""
    with reader(server), reader(server, encode_read(replace(ALL, ticket=ticket_for(range(NUM_BLOCKS))))) as stream:
        assert stream.recv(1)
        server.close()
        with pytest.raises(FileNotFoundError), reader(server):
            pass


def request(body: bytes) -> bytes:
    return REQUEST_HEAD.pack(b"AKVREAD1", len(body)) + body


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\0" * 1000,
    b"\xff" * 100_000,
    REQUEST_HEAD.pack(b"AKVREAD1", 2**32 - 1),
    REQUEST_HEAD.pack(b"AKVREAD2", 10) + b"x" * 10,
    request(b""),
    request(b"\xc1"),
    request(b"\xff" * 500),
    request(msgpack.packb([1] * 8)),
    request(msgpack.packb([1] * 9)),
    request(msgpack.packb({"number": 1})),
    request(msgpack.packb(["migration", 1, 0, False, [-1], "s", 0, 64, True])),
    request(msgpack.packb(["migration", 1, 0, False, [1.5], "s", 0, 64, True])),
    request(msgpack.packb(["migration", 1, 0, False, [0], "s", 0, 0, True])),
    request(msgpack.packb(["other", 1, 0, False, [0], "s", 0, 64, True])),
    request(msgpack.packb([["migration"], 1, 0, False, [0], "s", 0, 64, True])),
    request(b"\x99"),
]


def test_garbage_is_counted_and_harms_no_reader(server: DataServer) -> None:
    """When bytes are not a request, the server hangs up, counts them, and continues to serve."""
    for said in GARBAGE:
        with reader(server) as stream:
            with suppress(BrokenPipeError, ConnectionResetError):  # the server may hang up before it has all bytes
                stream.sendall(said)
            assert received(stream) == b""
    expect_served(server)
    assert sum(server.dropped.values()) == len(GARBAGE)


@pytest.mark.parametrize("said", [b"", b"A", encode_read(ALL)[:-1]])
def test_an_incomplete_request_is_counted(server: DataServer, said: bytes) -> None:
    """A reader that hangs up before its request is complete is counted."""
    with reader(server, said) as stream:
        stream.shutdown(socket.SHUT_WR)
        assert received(stream) == b""
    expect_served(server)
    assert server.dropped == {"the request is incomplete": 1}


def test_reads_are_bounded(tmp_path: Path) -> None:
    """At most 64 connections are served at once; idle connections are closed, and then others are served."""
    with serving(f"ipc://{tmp_path}/kv", request_s=2.0) as server:
        silent = [reader(server) for _ in range(64)]
        for connection in silent:
            connection.__enter__()
        with reader(server) as stream:
            assert received(stream) == encode_refused("too many readers at once")
        assert server.dropped.pop("too many readers at once") == 1
        expect_dropped(server, "the reader stalled", 64)
        expect_served(server)
        for connection in silent:
            connection.__exit__(None, None, None)


def test_chunks_that_are_too_large_are_refused(server: DataServer) -> None:
    """A reader cannot make the server fill its memory with one chunk."""
    with reader(server, encode_read(replace(ALL, ticket=ticket_for((0,)), per_chunk=129))) as stream:
        assert received(stream) == encode_refused("the chunk has too many blocks")


@pytest.mark.parametrize(
    ("bind", "message"),
    [
        ("ipc:///no/such/folder/kv", "No such file or directory"),
        ("ipc:///" + "x" * 200, "AF_UNIX path too long"),
        ("ipc://", "expected ipc://path or tcp://host:port"),
        ("inproc://x", "expected ipc://path or tcp://host:port"),
        ("tcp://127.0.0.1", "expected ipc://path or tcp://host:port"),
        ("tcp://127.0.0.1:70000", "no port is above 65535"),
        ("tcp://192.0.2.1:*", "Cannot assign requested address|could not bind"),
        ("tcp://0.0.0.0:*", "other workers cannot connect to this address"),
        ("tcp://*:*", "other workers cannot connect to this address"),
        ("tcp://[::]:*", "other workers cannot connect to this address"),
    ],
)
def test_an_address_that_cannot_be_bound_is_an_error(bind: str, message: str) -> None:
    """An address that cannot be bound gives one line with the address and the reason."""
    with pytest.raises(ActorserveError, match="cannot serve KV at ") as caught:
        DataServer(make_pools(), bind, KEY)
    assert caught.match(message)
    assert "\n" not in str(caught.value)


def test_the_announced_host_is_how_others_reach_it(tmp_path: Path) -> None:
    """A worker is reached by the host that it announces, and not by the address at which it listens."""
    source = KVTransfer(make_pools(), "tcp://127.0.0.1:*", KEY, announced_host="localhost")
    assert source.access.address.startswith("tcp://localhost:")
    destination = KVTransfer(make_pools(10), f"ipc://{tmp_path}/kv", b"another key")
    access = replace(source.access, host="another host")
    destination.fetch(Fetch(1, SOURCE, access, ticket_for((0,)), 0, (0,), is_urgent=False))
    destination.close()
    source.close()


def test_the_socket_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    """A server binds to the path that a killed server left, and removes it when it closes."""
    path = tmp_path / "kv"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with serving(f"ipc://{path}") as server:
        expect_served(server)
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    """An ordinary file at the path is an error, and stays."""
    path = tmp_path / "kv"
    path.write_text("precious", encoding="utf-8")
    with pytest.raises(ActorserveError, match="Address already in use"):
        DataServer(make_pools(), f"ipc://{path}", KEY)
    assert path.read_text(encoding="utf-8") == "precious"


@given(st.binary(max_size=100))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    """Decoding raises ProtocolError and nothing else."""
    with suppress(ProtocolError):
        decode_read(body)
    with suppress(ProtocolError):
        request_bytes(body.ljust(REQUEST_HEAD.size)[: REQUEST_HEAD.size], 100)
    with suppress(ProtocolError):
        decode_answer(body.ljust(ANSWER_HEAD.size)[: ANSWER_HEAD.size])


@given(st.lists(st.integers(0, 2**64 - 1), max_size=40), st.booleans(), st.integers(1, 16), st.text(max_size=64))
def test_frames_survive_encoding(blocks: list[int], on_host: bool, per_chunk: int, secret: str) -> None:
    """Decoding gives the request or answer that was encoded."""
    ticket = replace(ticket_for(blocks, on_host=on_host), secret=secret)
    read = Read(ticket, len(blocks), per_chunk, not on_host)
    said = encode_read(read)
    head, body = said[: REQUEST_HEAD.size], said[REQUEST_HEAD.size :]
    assert request_bytes(head, len(body)) == len(body)
    assert decode_read(body) == read
    assert decode_answer(encode_granted(by_piece=on_host)) == Granted(on_host)
    assert decode_answer(encode_refused("no")[: ANSWER_HEAD.size]) == Refused(2)


@contextmanager
def liar(path: Path, answer: bytes, *, hangs_up: bool) -> Iterator[None]:
    """A source that answers the first request with ``answer``."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        is_over = threading.Event()

        def serve() -> None:
            stream, _ = listener.accept()
            with stream:
                assert stream.recv(2**16)
                stream.sendall(answer)
                if not hangs_up:
                    is_over.wait(DEADLINE_S)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        is_over.set()
        thread.join()


BLOCK = content(1, 5)[0].tobytes()
GRANTED = encode_granted(by_piece=False)


def checked(body: bytes) -> bytes:
    return crc32(body).to_bytes(4) + body


@pytest.mark.parametrize(
    ("answer", "hangs_up", "message"),
    [
        (GRANTED + (crc32(BLOCK) ^ 1).to_bytes(4) + BLOCK, True, "its checksum is wrong"),
        (GRANTED + checked(BLOCK)[:-1], True, "the other side hung up"),
        (GRANTED + checked(BLOCK)[:-1], False, "sent nothing for 0.5 s"),
        (GRANTED, False, "sent nothing for 0.5 s"),
        (b"", True, "the other side hung up|Connection reset"),
        (b"", False, "sent nothing for 0.5 s"),
        (b"hello", True, "neither KV nor a refusal"),
        (ANSWER_HEAD.pack(b"X", 2**32 - 1), True, "neither KV nor a refusal"),
        (encode_refused("no\nsuch\xff"), True, "refused: no such"),
        (ANSWER_HEAD.pack(b"X", 2) + b"\xff\n", True, "refused: "),
    ],
)
def test_a_wrong_answer_fails_the_fetch(tmp_path: Path, answer: bytes, hangs_up: bool, message: str) -> None:
    """Whatever a source sends instead of the requested blocks, the fetch fails with one line, and writes nothing."""
    pools = make_pools(10)
    destination = KVTransfer(pools, f"ipc://{tmp_path}/kv", KEY, patience_s=0.5)
    access = KVAccess(pools.layout, f"ipc://{tmp_path}/liar")
    fetch = Fetch(1, SOURCE, access, ticket_for((0,)), 0, (0,), is_urgent=False)
    with liar(tmp_path / "liar", answer, hangs_up=hangs_up), pytest.raises(TransferError, match=message) as caught:
        destination.fetch(fetch)
    assert "\n" not in str(caught.value)
    destination.close()
    assert np.array_equal(held(pools), content(NUM_BLOCKS, 10))


def test_without_checksums_only_own_blocks_are_written(tmp_path: Path) -> None:
    """What a source on the same host sends goes straight into the blocks of the fetch, and into no others."""
    pools = make_pools(10)
    destination = KVTransfer(pools, f"ipc://{tmp_path}/kv", KEY, patience_s=0.5)
    access = KVAccess(pools.layout, f"ipc://{tmp_path}/liar", host=destination.access.host)
    fetch = Fetch(1, SOURCE, access, ticket_for((0, 1)), 0, (8, 3), is_urgent=False)
    answer = GRANTED + BLOCK + BLOCK[:-1]
    with liar(tmp_path / "liar", answer, hangs_up=True), pytest.raises(TransferError, match="the other side hung up"):
        destination.fetch(fetch)
    destination.close()
    assert np.array_equal(np.delete(held(pools), (8, 3), 0), np.delete(content(NUM_BLOCKS, 10), (8, 3), 0))
    assert held(pools)[8].tobytes() == BLOCK


@pytest.mark.parametrize("address", ["", "inproc://x", "tcp://nowhere", "memory://kv", "ipc://", "tcp://127.0.0.1:1"])
def test_a_bad_address_is_an_error(tmp_path: Path, address: str) -> None:
    """One line says that KV cannot be read from that address."""
    pools = make_pools(10)
    destination = KVTransfer(pools, f"ipc://{tmp_path}/kv", KEY, patience_s=0.2)
    fetch = Fetch(1, SOURCE, KVAccess(pools.layout, address), ticket_for((0,)), 0, (0,), is_urgent=False)
    with pytest.raises(TransferError, match=r"^KV cannot be read from [^\n]*$"):
        destination.fetch(fetch)
    destination.close()


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "cancelled"])
def test_closing_and_cancelling_end_fetches(tmp_path: Path, closes: bool) -> None:
    """Closing ends a fetch that waits for its source, and refuses later fetches. A cancellation ends this one alone."""
    pools = make_pools(10)
    destination = KVTransfer(pools, f"ipc://{tmp_path}/kv", KEY, patience_s=3600.0)
    access = KVAccess(pools.layout, f"ipc://{tmp_path}/silent")
    fetch = Fetch(1, SOURCE, access, ticket_for((0,)), 0, (0,), is_urgent=False)
    cancellation = Cancellation()
    told: list[str] = []

    def wait() -> None:
        try:
            destination.fetch(fetch, cancellation)
        except TransferError as error:
            told.append(str(error))

    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/silent")
        silent.listen()
        thread = threading.Thread(target=wait)
        thread.start()
        stream, _ = silent.accept()
        with stream:
            assert stream.recv(1)  # the request has arrived
            if closes:
                destination.close()
            else:
                cancellation.cancel("it is no longer wanted")
            thread.join(DEADLINE_S)
        assert not thread.is_alive()
    destination.close()
    cancellation = Cancellation()
    wait()
    closed = "this worker is shutting down"
    assert told == [closed if closes else "it is no longer wanted", closed]

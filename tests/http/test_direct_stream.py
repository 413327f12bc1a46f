"""Streamed answers as bytes on the connection, for every kind of HTTP/1 client."""

import asyncio
import socket
import struct

import pytest
from starlette.types import Receive, Scope, Send

from tests.http.fakes import DEADLINE_S, serving

PARTS = (b"a", b"", b"bc" * 5000, b"d")


async def streams(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-length", b"10002")] if scope["path"] == "/known" else []
    await send({"type": "http.response.start", "status": 204 if scope["path"] == "/empty" else 200, "headers": headers})
    for part in () if scope["path"] == "/empty" else PARTS:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def exchange(url: str, request: bytes) -> bytes:
    """All bytes that the server sends for a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(request)
    writer.write_eof()
    data = await reader.read()
    writer.close()
    await writer.wait_closed()
    return data


CHUNKED = b"1\r\na\r\n2710\r\n" + b"bc" * 5000 + b"\r\n1\r\nd\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("request_line", "header", "body"),
    [
        (b"GET / HTTP/1.1", b"transfer-encoding: chunked", CHUNKED),
        (b"GET / HTTP/1.0", b"connection: close", b"".join(PARTS)),
        (b"GET /known HTTP/1.1", b"content-length: 10002", b"".join(PARTS)),
        (b"HEAD / HTTP/1.1", b"http/1.1 200", b""),
        (b"GET /empty HTTP/1.1", b"http/1.1 204", b""),
    ],
)
async def test_every_answer_is_framed_for_its_request(request_line: bytes, header: bytes, body: bytes) -> None:
    """Only bodies of unknown length for HTTP/1.1 are sent in chunks; others are sent as they are, or not at all."""
    async with serving(streams) as (url, _):
        data = await exchange(url, request_line + b"\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    head, _, rest = data.partition(b"\r\n\r\n")
    assert header in head.lower()
    assert rest == body


async def test_a_connection_is_used_again_after_a_stream() -> None:
    """After a chunked answer the connection serves the next request."""
    async with serving(streams) as (url, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        for _ in range(3):
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(len(CHUNKED)) == CHUNKED
        writer.close()
        await writer.wait_closed()


async def test_answers_to_requests_that_came_early_keep_their_order() -> None:
    """A client may send its next requests during an answer; their answers follow one after the other."""
    async with serving(streams) as (url, _):
        data = await exchange(url, 3 * b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert data.count(CHUNKED) == 3
    assert data.endswith(CHUNKED)


async def until_left(_: Scope, receive: Receive, send: Send) -> None:
    """Streams until the client has left."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.create_task(leave())
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while not leaving.done():
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await asyncio.sleep(0.001)


def connection_tasks() -> int:
    """How many tasks serve connections and requests."""
    names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    return sum(name.endswith(("_server_callback", "_handle")) for name in names)


@pytest.mark.parametrize("early", [b"", b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"])
async def test_a_connection_ends_when_its_client_breaks_it_during_a_stream(early: bytes) -> None:
    """A broken connection keeps neither tasks nor a descriptor, even if another request was waiting in it."""
    async with serving(until_left) as (url, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(early)
        for _ in range(10):
            await reader.readuntil(b"x")
        assert connection_tasks() == 2
        abort = struct.pack("ii", 1, 0)  # closing resets the connection
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, abort)
        writer.transport.abort()
        async with asyncio.timeout(DEADLINE_S):
            while connection_tasks():  # noqa: ASYNC110 - the server has no event for this
                await asyncio.sleep(0.001)

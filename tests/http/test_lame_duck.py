"""A server that was told to stop: what load balancers, open connections and new clients see, over real sockets."""

import asyncio
import json
import socket
from contextlib import suppress
from types import SimpleNamespace
from typing import cast

import httpx
import pytest

from actorserve.http.server import _Connection
from tests.http.fakes import DEADLINE_S, ScriptedService, app_for, delivered, one_by_one, serving

STREAM = {"prompt": "x", "stream": True, "max_tokens": 100}
ASK = b"GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
LAME_DUCK_S = 3.0
NUM_CLIENTS = 40


async def version(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The head of the answer to a small request on this connection."""
    writer.write(ASK)
    async with asyncio.timeout(DEADLINE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b"}")
    return head


async def test_a_lame_duck_serves_and_says_that_it_stops() -> None:
    """From the first moment of a stop /ready is 503 and answers end their connections; until the lame duck's time is
    over all else works as before, and streams finish after it.
    """
    service, stop, loop = ScriptedService(), asyncio.Event(), asyncio.get_running_loop()
    app = app_for(service, is_stopping=stop.is_set)
    async with (
        serving(app, DEADLINE_S, stop=stop, lame_duck_s=LAME_DUCK_S) as (url, _),
        httpx.AsyncClient(timeout=DEADLINE_S) as client,
    ):
        host, port = url.removeprefix("http://").split(":")
        kept, idle = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        assert b"close" not in await version(*kept)
        ready = await client.get(f"{url}/ready")
        assert (ready.status_code, ready.json()) == (200, {"status": "ok", "instances": 1})
        stop.set()
        stopped_at = loop.time()
        for path, status in (("ready", 503), ("health", 200), ("ready", 503)):
            answer = await client.get(f"{url}/{path}")
            assert answer.status_code == status
            assert answer.headers["connection"] == "close"
        assert answer.json()["status"] == "stopping"
        assert b"connection: close\r\n" in await version(*kept)
        assert await asyncio.wait_for(kept[0].read(), DEADLINE_S) == b""
        asking = asyncio.create_task(client.post(f"{url}/v1/completions", json=STREAM))
        request = await service.request()
        request.feed([delivered("a")])
        assert loop.time() < stopped_at + LAME_DUCK_S, "the machine is too slow for this test"
        assert await asyncio.wait_for(idle[0].read(), DEADLINE_S) == b""  # closed at the end of the time
        assert loop.time() >= stopped_at + LAME_DUCK_S
        with pytest.raises(ConnectionError):
            await asyncio.open_connection(host, int(port))
        request.feed(one_by_one("bc"))
        assert (await asking).text.endswith("data: [DONE]\n\n")
        for _, writer in (kept, idle):
            writer.close()


async def until_refused(host: str, port: int) -> None:
    """Wait until the server accepts no more connections."""
    with suppress(ConnectionError):
        while True:
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_early", [False, True])
async def test_a_client_may_ask_again_on_the_connection_of_a_stream_that_began_before_the_stop(is_early: bool) -> None:
    """Such a stream could not ask its client to close the connection, so the next request on it is answered, also one
    that comes with the stream's end.
    """
    service, stop = ScriptedService(), asyncio.Event()
    async with serving(app_for(service), DEADLINE_S, stop=stop) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(STREAM).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        request = await service.request()
        request.feed([delivered("a")])
        async with asyncio.timeout(DEADLINE_S):
            assert b"connection: close" not in await reader.readuntil(b"\r\n\r\n")
            stop.set()
            await until_refused(host, int(port))
            if is_early:
                writer.write(ASK)
            request.feed(one_by_one("bc"))
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            if not is_early:
                await asyncio.sleep(0.1)  # for a server that closes at once
                writer.write(ASK)
            assert b"connection: close\r\n" in await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"}")
        assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
        writer.close()


@pytest.mark.parametrize("num_turns", range(8))
async def test_a_request_keeps_its_connection_at_any_moment_of_the_end(num_turns: int) -> None:
    """When a request cancels the wait that closes an idle connection, this wait ends at once, and closes nothing."""
    terminated, closed = asyncio.Event(), []
    terminated.set()

    async def close() -> None:
        closed.append(True)

    connection = SimpleNamespace(
        context=SimpleNamespace(terminated=terminated),
        config=SimpleNamespace(keep_alive_timeout=DEADLINE_S),
        _initiate_server_close=close,
    )
    waiting = asyncio.create_task(_Connection._idle_timeout(cast(_Connection, connection)))
    for _ in range(num_turns):
        await asyncio.sleep(0.0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not closed


async def test_connections_that_have_arrived_are_answered() -> None:
    """A connection that was made before the stop gets its answer, although the server had not accepted it yet."""
    async with serving(app_for(ScriptedService())) as (url, stop):
        host, port = url.removeprefix("http://").split(":")
        await asyncio.sleep(0)
        clients = [socket.create_connection((host, int(port))) for _ in range(NUM_CLIENTS)]  # the loop does not run
        stop.set()
        streams = [await asyncio.open_connection(sock=client) for client in clients]
        answers = await asyncio.gather(*(version(*stream) for stream in streams))
        assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
        for _, writer in streams:
            writer.close()


async def test_the_other_server_of_a_port_takes_over_without_a_lost_connection() -> None:
    """While one of two servers of a port stops, no client that connects is refused or cut off."""
    num_answered = 0
    gone = asyncio.Event()

    async def ask_again_and_again(host: str, port: int) -> None:
        nonlocal num_answered
        while not gone.is_set():
            reader, writer = await asyncio.open_connection(host, port)
            assert (await version(reader, writer)).startswith(b"HTTP/1.1 200")
            num_answered += 1
            writer.close()

    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))  # it does not listen, so it gets no connection
        port = holder.getsockname()[1]
        async with serving(app_for(ScriptedService()), port=port), asyncio.TaskGroup() as clients:
            async with serving(app_for(ScriptedService()), port=port):
                for _ in range(8):
                    clients.create_task(ask_again_and_again("127.0.0.1", port))
                while num_answered < NUM_CLIENTS:  # noqa: ASYNC110 - the clients count
                    await asyncio.sleep(0.01)
            before = num_answered
            while num_answered < before + NUM_CLIENTS:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            gone.set()

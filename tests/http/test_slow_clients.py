"""Clients that read slowly, or not at all: what they hold, and for how long."""

import asyncio
import json
import logging
from contextlib import suppress
from urllib.parse import urlsplit

import httpx
import pytest

from actorserve.core.messages import FinishReason
from tests.http.fakes import DEADLINE_S, ScriptedRequest, ScriptedService, app_for, deliver, end, one_by_one, serving

NUM_TOKENS = 20_000
BUFFER_BYTES = 16 * 1024


async def ask(url: str, stream: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for an answer on a connection of its own, whose client reads only what a test reads."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**12)
    body = json.dumps({"prompt": "x", "stream": stream, "max_tokens": 100}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


async def released(request: ScriptedRequest) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await request.released.wait()


async def test_a_client_that_never_reads_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    """Its request is released after the write timeout, long before its tokens are all taken, and others are served."""
    caplog.set_level(logging.INFO, logger="actorserve")
    service = ScriptedService()
    async with serving(app_for(service), send_buffer_bytes=BUFFER_BYTES, write_timeout_s=0.2) as (url, _):
        _, writer = await ask(url, stream=True)
        request = await service.request()
        request.feed_at_once(one_by_one("0123456789" * (NUM_TOKENS // 10)))
        await released(request)
        assert 0 < request.num_taken < NUM_TOKENS
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{url}/health")).status_code == 200
        writer.transport.abort()
    said = [record.getMessage() for record in caplog.records]
    assert any("has read nothing for 0.2 s" in line for line in said)


async def test_a_whole_answer_that_is_not_read_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    """An answer that is not streamed frees its memory, too: its connection is closed by the server."""
    caplog.set_level(logging.INFO, logger="actorserve")
    service = ScriptedService(lambda _: [deliver([0] * 1_000_000), end(FinishReason.LENGTH)])
    async with serving(app_for(service), send_buffer_bytes=BUFFER_BYTES, write_timeout_s=0.2) as (url, _):
        reader, writer = await ask(url, stream=False)
        async with asyncio.timeout(DEADLINE_S):
            while "has read nothing" not in caplog.text:  # noqa: ASYNC110 - the server has no event for this
                await asyncio.sleep(0.01)
            num_read = 0
            with suppress(ConnectionResetError):
                while data := await reader.read(2**16):
                    num_read += len(data)
        assert num_read < 1_000_000
        writer.transport.abort()


async def test_a_slow_client_is_waited_for() -> None:
    """A client that reads a little within each write timeout gets its whole stream."""
    service = ScriptedService(lambda _: one_by_one("0123456789" * 200))
    async with serving(app_for(service), send_buffer_bytes=BUFFER_BYTES, write_timeout_s=1.0) as (url, _):
        reader, writer = await ask(url, stream=True)
        read = b""
        async with asyncio.timeout(DEADLINE_S):
            while not read.endswith(b"0\r\n\r\n"):
                read += await reader.read(2**12)
                await asyncio.sleep(0.01)
        assert b"data: [DONE]" in read
        writer.close()

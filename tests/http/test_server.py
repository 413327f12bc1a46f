"""The real server on loopback: the official SDK, clients that leave or are slow, and the end of the server."""

import asyncio
import json
import os
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from actorserve.core.messages import FinishReason, RefusalReason
from actorserve.http import server
from actorserve.http.answers import answer
from actorserve.http.requests import unread_body
from actorserve.http.server import AddressError, bind, serve
from actorserve.settings import HttpSettings
from tests.http.fakes import (
    DEADLINE_S,
    MODEL,
    ScriptedRequest,
    ScriptedService,
    app_for,
    delivered,
    end,
    one_by_one,
    refuses,
    says,
    serving,
)

STREAM = {"prompt": "x", "stream": True, "max_tokens": 100}


def sdk(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


async def released(request: ScriptedRequest) -> None:
    """Wait until the request was released."""
    async with asyncio.timeout(DEADLINE_S):
        await request.released.wait()


async def test_sdk_chat() -> None:
    """The official SDK reads a chat, streamed or not, with usage and log-probabilities."""
    async with serving(app_for(says("hello €", FinishReason.STOP))) as (url, _), sdk(url) as client:
        whole = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=0, seed=3
        )
        assert whole.choices[0].message.content == "hello €"
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello €"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage


async def test_sdk_completion() -> None:
    """The official SDK reads a completion, streamed or not, of text and of token ids."""
    async with serving(app_for(says("abc"))) as (url, _), sdk(url) as client:
        whole = await client.completions.create(model=MODEL, prompt=[[1, 2], [3]], logprobs=1)
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        chunks = [chunk async for chunk in stream]
        models = await client.models.list()
    assert [choice.text for choice in whole.choices] == ["abc", "abc"]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"
    assert [model.id for model in models.data] == [MODEL]


async def test_sdk_errors() -> None:
    """The official SDK raises the exception that belongs to each error."""
    async with serving(app_for(refuses(RefusalReason.OVERLOADED))) as (url, _), sdk(url) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model=MODEL, prompt="x", temperature=9)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model=MODEL, prompt="x", stream=True)


async def test_sdk_error_in_mid_stream() -> None:
    """The official SDK raises an error that comes in the middle of a stream, after the text before it."""
    service = ScriptedService()
    text = ""
    async with serving(app_for(service)) as (url, _), sdk(url) as client:
        asking = asyncio.create_task(client.completions.create(model=MODEL, prompt="x", stream=True))
        request = await service.request()
        request.feed([delivered("ab")])
        chunks = await asking
        with pytest.raises(openai.APIError, match="grammar"):  # noqa: PT012 - the error comes between chunks
            async for chunk in chunks:
                text += chunk.choices[0].text
                request.feed([end(FinishReason.ERROR)])
    assert text == "ab"


async def test_streaming_client_leaves() -> None:
    """A client that drops its stream releases all of its choices."""
    service = ScriptedService()
    async with serving(app_for(service)) as (url, _), httpx.AsyncClient(timeout=DEADLINE_S) as client:
        posted = client.build_request("POST", f"{url}/v1/completions", json=STREAM | {"n": 3})
        asking = asyncio.create_task(client.send(posted, stream=True))
        (await service.request(1)).feed([delivered("a")])
        response = await asking
        await anext(response.aiter_lines())
        assert not any(request.released.is_set() for request in service.requests)
        await response.aclose()
        for index in range(3):
            await released(await service.request(index))


@pytest.mark.parametrize("streamed", [False, True])
async def test_client_leaves_before_any_token(streamed: bool) -> None:
    """A client that leaves before the first token releases its request, streaming or not."""
    service = ScriptedService()
    async with serving(app_for(service)) as (url, _), httpx.AsyncClient(timeout=DEADLINE_S) as client:
        asking = asyncio.create_task(client.post(f"{url}/v1/completions", json=STREAM | {"stream": streamed}))
        request = await service.request()
        assert not request.released.is_set()
        asking.cancel()
        await released(request)


@pytest.mark.parametrize("streamed", [False, True])
async def test_client_that_ends_its_side_has_left(streamed: bool) -> None:
    """A client that closes its sending side has gone: its request is released, though not as complete."""
    service = ScriptedService()
    async with serving(app_for(service)) as (url, _):
        reader, writer = await asyncio.open_connection(*host_port(url))
        writer.write(raw_post("/v1/completions", STREAM | {"stream": streamed}))
        request = await service.request()
        assert not request.released.is_set()
        writer.write_eof()
        await released(request)
        assert not request.was_complete
        assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
        writer.close()


async def test_slow_client_loses_nothing() -> None:
    """Tokens for a client that does not read wait in its stream; when it reads, it gets all of them."""
    service = ScriptedService()
    num_tokens = 5_000
    async with serving(app_for(service), send_buffer_bytes=16 * 1024) as (url, _):
        reader, writer = await asyncio.open_connection(*host_port(url), limit=2**12)
        writer.write(raw_post("/v1/completions", STREAM))
        request = await service.request()
        request.feed(one_by_one("0123456789" * (num_tokens // 10)))
        await stalled(request)
        assert 0 < request.num_taken < num_tokens
        texts: list[str] = []
        while (line := await asyncio.wait_for(reader.readline(), DEADLINE_S)) != b"data: [DONE]\n":
            assert line
            if line.startswith(b"data: "):
                texts.append(json.loads(line[6:])["choices"][0]["text"])
        writer.close()
    assert "".join(texts) == "0123456789" * (num_tokens // 10)


async def test_client_that_never_reads_is_cut_off_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """When an answer's time is over, a client that does not read loses its request and its connection."""
    monkeypatch.setattr(answer, "_LAST_WRITE_S", 0.1)
    monkeypatch.setattr(server, "_CLOSE_TIMEOUT_S", 0.1)
    service = ScriptedService()
    app = app_for(service, HttpSettings(max_answer_s=2.0))
    async with serving(app, send_buffer_bytes=16 * 1024) as (url, _):
        num_before = len(os.listdir("/proc/self/fd"))
        _, writer = await asyncio.open_connection(*host_port(url), limit=2**12)
        writer.write(raw_post("/v1/completions", STREAM))
        request = await service.request()
        request.feed_at_once(one_by_one("0123456789" * 1_000))
        await released(request)
        assert 0 < request.num_taken < 10_000
        async with asyncio.timeout(DEADLINE_S):
            while len(os.listdir("/proc/self/fd")) > num_before + 1:  # noqa: ASYNC110 - the server has no event for this
                await asyncio.sleep(0.01)
        writer.transport.abort()


async def stalled(request: ScriptedRequest) -> None:
    """Wait until the answer has taken nothing from the request's stream for many turns of the event loop."""
    num_taken, num_turns = 0, 0
    async with asyncio.timeout(DEADLINE_S):
        while num_turns < 1_000:
            await asyncio.sleep(0)
            num_turns = num_turns + 1 if 0 < request.num_taken == num_taken else 0
            num_taken = request.num_taken


def host_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def raw_post(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def test_keep_alive() -> None:
    """A silent stream gets comments, which are not events, before its first token and after it."""
    service = ScriptedService()
    settings = HttpSettings(keep_alive_s=0.01)
    async with (
        serving(app_for(service, settings)) as (url, _),
        httpx.AsyncClient(timeout=DEADLINE_S) as client,
        client.stream("POST", f"{url}/v1/completions", json=STREAM) as response,
    ):
        lines = response.aiter_lines()
        assert await anext(lines) == ": keep-alive"
        request = await service.request()
        request.feed([delivered("a")])
        while not (await anext(lines)).startswith("data: "):
            pass
        while await anext(lines) != ": keep-alive":
            pass
        request.feed([end(FinishReason.LENGTH)])
        rest = [line async for line in lines]
    assert rest[-2:] == ["data: [DONE]", ""]


async def test_keep_alive_while_text_is_held_back() -> None:
    """Tokens that bring no text, because they may begin a stop string, do not delay the comments."""
    service = ScriptedService()
    settings = HttpSettings(keep_alive_s=0.05)
    body = STREAM | {"stop": "y" * 64}
    async with (
        serving(app_for(service, settings)) as (url, _),
        httpx.AsyncClient(timeout=DEADLINE_S) as client,
        asyncio.TaskGroup() as group,
    ):
        streaming = group.create_task(client.post(f"{url}/v1/completions", json=body))
        request = await service.request()
        for _ in range(60):
            request.feed([delivered("y")])
            await asyncio.sleep(0.005)
        request.feed([end(FinishReason.LENGTH)])
        response = await streaming
    assert response.text.startswith(": keep-alive\n\n: keep-alive\n\n")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/nothing", "/health"])
@pytest.mark.parametrize("announced", [True, False])
async def test_huge_body(path: str, announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 100 MB, with or without content-length, gets its error, is not submitted, and leaves no connection."""
    monkeypatch.setattr(unread_body, "LINGER_S", DEADLINE_S)  # a busy machine takes longer than usual to discard it
    service = ScriptedService()
    chunk = b"[" * 2**20

    async def chunks() -> Any:
        for _ in range(100):
            yield chunk

    headers = {"content-type": "application/json"}
    if announced:
        headers["content-length"] = str(100 * 2**20)
    async with serving(app_for(service)) as (url, _), httpx.AsyncClient(timeout=DEADLINE_S) as client:
        response = await client.post(url + path, content=chunks(), headers=headers)
        assert response.status_code == {"/v1/completions": 413, "/v1/nothing": 404, "/health": 405}[path]
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert (await client.get(f"{url}/health")).status_code == 200
    assert service.requests == []


async def test_client_that_never_stops_sending() -> None:
    """A client that sends forever and never reads is disconnected."""
    async with serving(app_for(ScriptedService())) as (url, _):
        _, writer = await asyncio.open_connection(*host_port(url))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        with pytest.raises(ConnectionError):  # noqa: PT012 - any of the writes may be the one
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    writer.write(b"10000\r\n" + b"[" * 0x10000 + b"\r\n")
                    await writer.drain()
        writer.close()


async def test_connection_without_a_request_ends_with_its_client() -> None:
    """A client that closes an idle connection frees its descriptor at once, not after the keep-alive time."""
    async with serving(app_for(ScriptedService())) as (url, _):
        num_before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            reader, writer = await asyncio.open_connection(*host_port(url))
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n")
            writer.close()
            await writer.wait_closed()
        async with asyncio.timeout(DEADLINE_S):
            while len(os.listdir("/proc/self/fd")) > num_before:  # noqa: ASYNC110 - the server has no event for this
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", b"404"),
        (
            b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, http2-settings, close\r\nupgrade: h2c\r\n"
            b"http2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n",
            b"200",
        ),
    ],
    ids=["prior knowledge", "upgrade"],
)
async def test_http2_is_answered_in_http1(request_bytes: bytes, status: bytes) -> None:
    """A request for HTTP/2 is answered in HTTP/1.1."""
    async with serving(app_for(ScriptedService())) as (url, _):
        reader, writer = await asyncio.open_connection(*host_port(url))
        writer.write(request_bytes)
        line = await asyncio.wait_for(reader.readline(), DEADLINE_S)
        assert line.split()[:2] == [b"HTTP/1.1", status]
        writer.close()


@pytest.mark.parametrize("version", [b"13", b"99"])
async def test_a_request_for_a_web_socket_is_answered_and_its_connection_ends(version: bytes) -> None:
    """A request for a web socket gets its answer in HTTP, and its connection serves on or closes as any other."""
    async with serving(app_for(ScriptedService())) as (url, _):
        reader, writer = await asyncio.open_connection(*host_port(url))
        request = (
            b"GET /health HTTP/1.1\r\nhost: [::1]\r\nupgrade: websocket\r\nsec-websocket-version: " + version + b"\r\n"
            b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nconnection: upgrade, %s\r\n\r\n"
        )
        writer.write(request % b"x")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
        assert head.startswith(b"HTTP/1.1 200")
        writer.write(request % b"close")
        rest = await asyncio.wait_for(reader.read(), DEADLINE_S)  # to the end of the connection
        assert b"HTTP/1.1 200" in rest
        writer.close()


async def test_client_leaves_while_sending(caplog: pytest.LogCaptureFixture) -> None:
    """A client that leaves in the middle of its request causes no error and leaves nothing behind."""
    async with serving(app_for(ScriptedService())) as (url, _):
        _, writer = await asyncio.open_connection(*host_port(url))
        writer.write(raw_post("/v1/completions", STREAM)[:-5])
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{url}/health")).status_code == 200
    assert [record for record in caplog.records if record.name != "httpx"] == []


async def test_drain() -> None:
    """A server that is told to end accepts no new connection, and lets a stream finish."""
    service = ScriptedService()
    async with serving(app_for(service), DEADLINE_S) as (url, stop), httpx.AsyncClient(timeout=DEADLINE_S) as client:
        asking = asyncio.create_task(client.post(f"{url}/v1/completions", json=STREAM))
        request = await service.request()
        stop.set()
        async with asyncio.timeout(DEADLINE_S):
            while await connects(url):  # noqa: ASYNC110 - nothing tells a client that a listener is closed
                await asyncio.sleep(0.01)
        request.feed(one_by_one("late"))
        response = await asking
    assert response.text.endswith("data: [DONE]\n\n")


async def test_drain_has_an_end() -> None:
    """Requests that are not done by the end of the drain are cancelled and released."""
    service = ScriptedService()
    async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
        async with serving(app_for(service), 0.05) as (url, _):
            asking = asyncio.create_task(client.post(f"{url}/v1/completions", json=STREAM))
            request = await service.request()
        assert request.released.is_set()
        with pytest.raises(httpx.HTTPError):
            (await asking).raise_for_status()


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_unfinished_answer_gets_an_error(streamed: bool) -> None:
    """When the drain's time is over, clients get an error: as an event in a stream, otherwise as a 503."""
    service = ScriptedService()
    drained = end(FinishReason.ERROR, RefusalReason.DRAINING, 2.0)
    app, body = app_for(service), STREAM | {"stream": streamed}
    async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
        async with serving(app, 0.05, give_up=lambda: service.requests[0].feed([drained])) as (url, _):
            asking = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
            request = await service.request()
            request.feed([delivered("a")])
            await stalled(request)
        response = await asking
    if streamed:
        first, error, done = response.text.split("\n\n")[:3]
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "a"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "draining"
        assert done == "data: [DONE]"
    else:
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "draining"
        assert response.headers["retry-after"] == "2"


async def test_no_drain_when_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    """A server that is cancelled, as when its process fails, ends all streams and idle connections."""
    service = ScriptedService()
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def never() -> None:
        await asyncio.Event().wait()

    server = asyncio.create_task(
        serve(app_for(service), listener, shutdown=never, drain_timeout_s=1_000.0, give_up=lambda: None)
    )
    _, idle = await asyncio.open_connection(*host_port(url))
    async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
        asking = asyncio.create_task(client.post(f"{url}/v1/completions", json=STREAM))
        request = await service.request()
        server.cancel()
        await asyncio.wait_for(asyncio.wait([server]), DEADLINE_S)
        assert server.cancelled()
        await released(request)
        with pytest.raises(httpx.HTTPError):
            (await asking).raise_for_status()
    idle.close()
    assert [record for record in caplog.records if record.name != "httpx"] == []


async def test_drain_does_not_wait_for_a_stalled_client() -> None:
    """A client that has stopped reading cannot keep the server from ending."""
    service = ScriptedService()
    async with serving(app_for(service), 0.05, send_buffer_bytes=16 * 1024) as (url, _):
        reader, writer = await asyncio.open_connection(*host_port(url), limit=2**12)
        writer.write(raw_post("/v1/completions", STREAM))
        request = await service.request()
        request.feed(one_by_one("0123456789" * 500))
        await stalled(request)
    assert request.released.is_set()
    rest = await asyncio.wait_for(reader.read(), DEADLINE_S)  # from the buffers of the kernel and the transport
    assert b"[DONE]" not in rest
    writer.close()


async def test_stopped_choice_is_released_before_the_others() -> None:
    """A stop string releases its own choice at once, as complete, while other choices of the answer go on."""
    service = ScriptedService()
    async with serving(app_for(service)) as (url, _), httpx.AsyncClient(timeout=DEADLINE_S) as client:
        body = {"prompt": "x", "n": 2, "stop": "b", "max_tokens": 50}
        asking = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
        second = await service.request(1)
        first = await service.request(0)
        first.feed([delivered("abc")])
        await released(first)
        assert first.was_complete
        assert not second.released.is_set()
        second.feed(one_by_one("xyz"))
        choices = (await asking).json()["choices"]
    assert [choice["text"] for choice in choices] == ["a", "xyz"]


async def connects(url: str) -> bool:
    try:
        _, writer = await asyncio.open_connection(*host_port(url))
    except ConnectionError:
        return False
    writer.close()
    return True


def test_port_in_use() -> None:
    """A port in use is an error of one clear line."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(AddressError, match=rf"^port {port} on 127\.0\.0\.1 is in use$"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "x" * 300])
def test_address_of_another_machine(host: str) -> None:
    """A host of another machine is an error of one clear line."""
    with pytest.raises(AddressError, match=r"is not an address of this machine$"):
        bind(host, 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_bind_ipv6() -> None:
    """The server can listen on an IPv6 address."""
    with bind("::1", 0) as listener:
        assert listener.getsockname()[1] > 0

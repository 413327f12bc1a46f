"""Requests that are made to cost much: a clear answer in bounded time, and other clients are served meanwhile."""

import asyncio
import json
import time
from typing import Any

import pytest

from actorserve.http.requests import body as bodies
from tests.http.fakes import DEADLINE_S, TOKENIZER, app_for, client_for, says, serving
from tests.http.requests.refusals import CHAT, refused

Json = dict[str, Any]
SOON_S = 5.0
"""Far more than any of these requests takes, and far less than what they try to cost."""


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('"chat_template_kwargs": {"a": ' + "[" * 65 + "]" * 65 + "}", "chat_template_kwargs"),
        ('"chat_template_kwargs": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}", None),
        ('"temperature": 1e999999999', "temperature"),
        ('"max_tokens": 1e9', "max_tokens"),
        ('"seed": ' + "9" * 4_000, "seed"),
        ('"seed": 1' + "0" * 100_000, None),
        ('"user": "\\ud800"', None),
        ('"messages": [{"role": "user", "content": "\\udc00"}]', None),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_json_that_is_made_to_hurt(text: str, param: str | None) -> None:
    """Deep JSON, numbers without end and lone surrogates are a 400 within moments."""
    began = time.perf_counter()
    messages = "" if "messages" in text else json.dumps(CHAT)[1:-1] + ","
    status, error = await refused("chat/completions", f"{{{messages} {text}}}".encode())
    assert (status, error["param"]) == (400, param)
    assert time.perf_counter() - began < SOON_S


@pytest.mark.parametrize(
    "value",
    [
        "[" + "[]," * 200_000 + "1]",
        "[" + '{"":1},' * 60_000 + "1]",
        "{" + ",".join(f'"{number}":1' for number in range(200_000)) + "}",
        "[" + "1," * 1_100_000 + "1]",
        "[" + '"a",' * 300_000 + '"a"]',
    ],
    ids=["lists", "objects", "fields", "numbers", "strings"],
)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_very_many_values_are_not_made(value: str, path: str) -> None:
    """A body that would become very many objects is refused unread, also in a field that the server ignores."""
    status, error = await refused(path, f'{{"prompt": "a", "nobody_knows": {value}}}'.encode())
    assert (status, error["code"]) == (400, "invalid_json")
    assert "has more than" in error["message"]


async def test_brackets_and_quotes_in_a_text_are_text() -> None:
    """A long text of code is no structure: its brackets, commas and escaped quotes do not count."""
    code = '[{"a": "\\"}, ' * 60_000
    status, error = await refused(
        "chat/completions", json.dumps({"messages": [{"role": "user", "content": code}]}).encode()
    )
    assert (status, error["code"]) == (400, "context_length_exceeded")


async def test_a_key_given_twice() -> None:
    """Of a key that is given twice the last value counts, as in most parsers of JSON."""
    service = says("ok")
    async with client_for(service) as client:
        content = b'{"prompt": "a", "max_tokens": 1, "max_tokens": 2}'
        response = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 200
    assert service.specs[0].sampling.max_tokens == 2


async def test_nul_is_a_character() -> None:
    """A NUL in a text reaches the model as any other character does."""
    service = says("ok")
    async with client_for(service) as client:
        await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a\0b"}]})
    assert TOKENIZER.decode(service.specs[0].prompt_token_ids) == "a\0b"


@pytest.mark.parametrize(
    "headers",
    [b"x: " + b"y" * 2**20 + b"\r\n", b"".join(b"x-%d: y\r\n" % i for i in range(100_000))],
    ids=["long", "many"],
)
async def test_header_bombs(headers: bytes) -> None:
    """Headers of a megabyte, or 100,000 of them, end their connection within moments, and others are served."""
    async with serving(app_for(says("ok"))) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        began = time.perf_counter()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + headers + b"content-length: 0\r\n\r\n")
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer = await reader.read(2_000)
        except ConnectionError:
            answer = b""
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
        assert time.perf_counter() - began < SOON_S
        writer.close()
        _, other = await asyncio.open_connection(host, int(port))
        other.close()


async def test_a_body_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that trickles in without an end is a 408 after its time is up."""
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.5)
    async with serving(app_for(says("ok"))) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n")

        async def trickle() -> None:
            while True:
                writer.write(b" ")
                await asyncio.sleep(0.05)

        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            trickling = group.create_task(trickle())
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
            trickling.cancel()
        writer.close()


async def test_many_tools_are_served_soon() -> None:
    """As many functions as are permitted, with large schemas, cost less than a moment."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(100)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(128)]
    began = time.perf_counter()
    status, error = await refused("chat/completions", json.dumps(CHAT | {"tools": tools}).encode())
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert time.perf_counter() - began < SOON_S

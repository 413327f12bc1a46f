"""Every error under ``/v1/messages`` has Anthropic's form, and keys come as ``x-api-key``, too."""

import hashlib
from typing import Any

import httpx
import pytest

from actorserve.core.messages import FinishReason
from actorserve.http.access.api_keys import ApiKey, ApiKeys
from actorserve.settings import HttpSettings
from tests.http.fakes import MODEL, ScriptedService, client_for, says

SECRET = "sk-actorserve-test"
KEYS = ApiKeys([ApiKey("someone", hashlib.sha256(SECRET.encode()).digest(), 0, 0)])
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


def check(response: httpx.Response, status: int, kind: str) -> str:
    """The message of an error in Anthropic's form."""
    assert response.status_code == status
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    message: str = body["error"]["message"]
    return message


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "kind"),
    [
        ("GET", "/v1/messages", b"", 405, "invalid_request_error"),
        ("POST", "/v1/messages/nothing", b"{}", 404, "not_found_error"),
        ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
        ("POST", "/v1/messages", b"[]", 400, "invalid_request_error"),
        ("POST", "/v1/messages", b" " * 200_000, 413, "request_too_large"),
        ("POST", "/v1/messages/count_tokens", b"{}", 400, "invalid_request_error"),
    ],
)
async def test_early_errors(method: str, path: str, content: bytes, status: int, kind: str) -> None:
    """Errors before a request is understood have the form, too."""
    async with client_for(ScriptedService(), HttpSettings(max_body_bytes=100_000)) as client:
        response = await client.request(method, path, content=content, headers={"content-type": "application/json"})
    check(response, status, kind)


async def test_an_unknown_model() -> None:
    """A model that is not served is not found."""
    async with client_for(ScriptedService()) as client:
        response = await client.post("/v1/messages", json=BODY | {"model": "other"})
    check(response, 404, "not_found_error")


async def test_a_wrong_content_type() -> None:
    """A form of a web page is no request."""
    async with client_for(ScriptedService()) as client:
        response = await client.post("/v1/messages", content=b"a=b", headers={"content-type": "text/plain"})
    check(response, 415, "invalid_request_error")


async def test_a_bug() -> None:
    """An unexpected error has the form, and tells nothing."""

    class Broken(ScriptedService):
        def submit(self, *_: object) -> None:
            raise RuntimeError("secret")

    async with client_for(Broken()) as client:
        response = await client.post("/v1/messages", json=BODY)
    assert "secret" not in check(response, 500, "api_error")


async def test_a_missing_key() -> None:
    """Without a key the answer tells which headers may hold one."""
    async with client_for(ScriptedService(), api_keys=KEYS) as client:
        response = await client.post("/v1/messages", json=BODY)
    assert "x-api-key" in check(response, 401, "authentication_error")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-api-key", SECRET)], 200),
        ([("authorization", f"Bearer {SECRET}")], 200),
        ([("x-api-key", "wrong"), ("authorization", f"Bearer {SECRET}")], 200),
        ([("x-api-key", SECRET), ("authorization", "Bearer wrong")], 401),
        ([("x-api-key", "wrong")], 401),
        ([("x-api-key", SECRET), ("x-api-key", SECRET)], 401),
        ([("x-api-key", "")], 401),
    ],
)
async def test_keys(headers: list[tuple[str, str]], status: int) -> None:
    """A key counts in either header; if there are both, the standard one decides."""
    async with client_for(says("hello", FinishReason.STOP), api_keys=KEYS) as client:
        response = await client.post("/v1/messages", json=BODY, headers=headers)
    assert response.status_code == status


async def test_errors_of_other_routes_keep_their_form() -> None:
    """Only paths under ``/v1/messages`` have this form, not those that begin like it."""
    async with client_for(ScriptedService()) as client:
        for path in ("/v1/messagesx", "/v1/chat/completions"):
            response = await client.get(path)
            assert set(response.json()) == {"error"}

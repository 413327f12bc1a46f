"""Everything except the answers: unknown routes, request ids, health, metrics, and bugs."""

import logging
import re

import httpx
import pytest

from actorserve import __version__
from actorserve.core.messages import RequestSpec
from actorserve.http.app import create_app
from actorserve.http.stream import AnswerStream
from actorserve.settings import HttpSettings
from tests.http.fakes import (
    CONTEXT_TOKENS,
    DESCRIPTION,
    TOKENIZER,
    ScriptedService,
    app_for,
    client_for,
    says,
    serving,
)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("POST", "/health/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/metrics", 405),
    ],
)
async def test_unknown_routes(method: str, path: str, status: int) -> None:
    """An unknown route or method is an error in the same format as all other errors."""
    async with client_for(ScriptedService()) as client:
        response = await client.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert ("allow" in response.headers) == (status == 405)


async def test_health() -> None:
    """The server is healthy while a worker is up."""
    service = ScriptedService()
    async with client_for(service) as client:
        assert (await client.get("/health")).status_code == 200
        service.num_instances = 0
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/version")).json() == {"version": __version__}


@pytest.mark.parametrize("path", ["/health", "/v1/nothing", "/v1/completions"])
async def test_request_id(path: str) -> None:
    """A client's request id comes back, also with errors. A missing, long or malformed id is replaced."""
    async with client_for(ScriptedService()) as client:
        assert (await client.get(path, headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
        for given in ("", "x" * 129, "a b", "a\x01b", "ä".encode().decode("latin-1"), "a\nb"):
            headers = [(b"x-request-id", given.encode("latin-1"))]
            made = (await client.get(path, headers=headers)).headers["x-request-id"]
            assert re.fullmatch("[0-9a-f]{32}", made)


async def test_no_chat_template() -> None:
    """A model without a chat template refuses chats and serves completions."""
    app = create_app(says("a"), TOKENIZER, None, DESCRIPTION, HttpSettings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        chat = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        completion = await client.post("/v1/completions", json={"prompt": "x"})
    assert (chat.status_code, chat.json()["error"]["code"]) == (400, "no_chat_template")
    assert completion.status_code == 200


class BuggyService(ScriptedService):
    """A service with a bug."""

    def submit(self, request: RequestSpec, stream: AnswerStream) -> None:
        super().submit(request, stream)
        if len(self.requests) > 1:
            raise KeyError("at 0x7f00 in /secret/path")


async def test_bug(caplog: pytest.LogCaptureFixture) -> None:
    """A bug is a 500 without its details and one line in the log, and releases the requests that were submitted."""
    service = BuggyService()
    with caplog.at_level(logging.INFO):
        async with serving(app_for(service)) as (url, _), httpx.AsyncClient() as client:
            headers = {"x-request-id": "mine"}
            response = await client.post(f"{url}/v1/completions", json={"prompt": "x", "n": 3}, headers=headers)
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["error"] == {
        "message": "internal error",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert service.requests[0].released.is_set()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "actorserve.http"]
    assert "KeyError" in line
    assert "\n" not in line


async def test_context_is_told() -> None:
    """An error about length names the context's size."""
    async with client_for(ScriptedService()) as client:
        response = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": CONTEXT_TOKENS})
    assert f"context of {CONTEXT_TOKENS} tokens" in response.json()["error"]["message"]

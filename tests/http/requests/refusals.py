"""Requests that work as they stand, and a way to send one that must be refused."""

import asyncio
from typing import Any

from actorserve.settings import HttpSettings
from tests.http.fakes import DEADLINE_S, MODEL, ScriptedService, client_for

Json = dict[str, Any]
CHAT: Json = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: Json = {"model": MODEL, "prompt": "hi"}
ROUTES = {"chat/completions": CHAT, "completions": COMPLETION}


async def refused(
    route: str, body: bytes, headers: dict[str, str] | None = None, settings: HttpSettings | None = None
) -> tuple[int, Json]:
    """The status and the error of a request that must not be submitted."""
    service = ScriptedService()
    async with client_for(service, settings) as client, asyncio.timeout(DEADLINE_S):
        headers = {"content-type": "application/json", **(headers or {})}
        response = await client.post(f"/v1/{route}", content=body, headers=headers)
    assert service.requests == []
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(response.content) < 2_000
    return response.status_code, error

"""``/health_generate`` tells whether workers work, and ``/ping`` whether one is up."""

from pathlib import Path

import pytest

from actorserve.core.messages import FinishReason, RefusalReason
from actorserve.http.access.api_keys import read_api_keys
from tests.http.fakes import ScriptedService, client_for, deliver, end, refuses


async def test_a_token_is_health() -> None:
    """The check makes one token with the least work, and releases its request."""
    service = ScriptedService(lambda _: [deliver((5,)), end(FinishReason.LENGTH)])
    async with client_for(service) as client:
        response = await client.get("/health_generate")
    assert (response.status_code, response.json()["status"]) == (200, "ok")
    [request] = service.requests
    assert (request.spec.sampling.max_tokens, len(request.spec.prompt_token_ids)) == (1, 1)
    assert request.released.is_set()


async def test_no_token_in_time_is_no_health() -> None:
    """A server whose workers hang, refuse, or were never up is unavailable; no request is left behind."""
    hanging = ScriptedService()
    async with client_for(hanging) as client:
        response = await client.get("/health_generate", headers={"x-request-timeout": "0.05"})
    assert (response.status_code, response.json()["status"]) == (503, "unavailable")
    assert hanging.requests[0].released.is_set()
    async with client_for(refuses(RefusalReason.OVERLOADED)) as client:
        assert (await client.get("/health_generate")).status_code == 503
    empty = ScriptedService()
    empty.model = None
    async with client_for(empty) as client:
        assert (await client.get("/health_generate")).status_code == 503
    assert not empty.requests


async def test_a_wrong_limit_is_refused() -> None:
    """The header must be a number, as for any answer."""
    async with client_for(ScriptedService()) as client:
        response = await client.get("/health_generate", headers={"x-request-timeout": "soon"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-timeout")


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_is_health(method: str) -> None:
    """Both methods answer as /health does."""
    service = ScriptedService()
    async with client_for(service) as client:
        assert (await client.request(method, "/ping")).status_code == 200
        service.num_instances = 0
        assert (await client.request(method, "/ping")).status_code == 503


async def test_only_what_costs_nothing_is_open(tmp_path: Path) -> None:
    """With API keys /ping needs none, and the routes that make workers or tokenizers work need one."""
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nname = "a"\nsha256 = "{"0" * 64}"\n')
    file.chmod(0o600)
    async with client_for(ScriptedService(), api_keys=read_api_keys(file)) as client:
        assert (await client.get("/ping")).status_code == 200
        assert (await client.get("/health_generate")).status_code == 401
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 401

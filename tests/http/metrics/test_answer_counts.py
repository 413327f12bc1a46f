"""``http_requests_total``: what was answered, and what was refused."""

import hashlib

import httpx

from actorserve.http.access.api_keys import ApiKey, ApiKeys
from tests.http.fakes import MODEL, ScriptedService, client_for, says


async def counted(client: httpx.AsyncClient) -> dict[tuple[str, str, str], float]:
    """How many requests were answered, by handler, method and status."""
    page = (await client.get("/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("http_requests_total{")]
    counts = {}
    for line in lines:
        labels, value = line.removeprefix("http_requests_total{").rsplit("} ", 1)
        named = dict(label.split("=", 1) for label in labels.replace('"', "").split(","))
        counts[named["handler"], named["method"], named["status"]] = float(value)
    return counts


async def test_answers_and_refusals() -> None:
    """Answers and refusals of a route are counted apart, and a route's path stands for all its names."""
    async with client_for(says("ok")) as client:
        for max_tokens in (1, 2, -1):
            await client.post("/v1/completions", json={"prompt": "x", "max_tokens": max_tokens})
        for name in (MODEL, "one", "two"):
            await client.get(f"/v1/models/{name}")
        counts = await counted(client)
    assert counts["/v1/completions", "POST", "2xx"] == 2
    assert counts["/v1/completions", "POST", "4xx"] == 1
    (path,) = {handler for handler, _, _ in counts if handler.startswith("/v1/models/")}
    assert counts[path, "GET", "2xx"] == 1
    assert counts[path, "GET", "4xx"] == 2


async def test_clients_make_up_no_labels() -> None:
    """Paths and methods that the server does not know are counted together."""
    async with client_for(ScriptedService()) as client:
        for number in range(5):
            await client.request(f"MADE{number}", f"/made/up/{number}")
        counts = await counted(client)
    assert counts == {("none", "none", "4xx"): 5}


async def test_refused_keys() -> None:
    """A request without the right key is counted, too."""
    keys = ApiKeys([ApiKey("a", hashlib.sha256(b"right").digest(), 0, 0)])
    async with client_for(ScriptedService(), api_keys=keys) as client:
        await client.get("/v1/models")
        client.headers["authorization"] = "Bearer right"
        assert (await counted(client))["none", "GET", "4xx"] == 1

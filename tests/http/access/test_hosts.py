"""Requests for other hosts and from other origins, which a web page makes without its user's knowledge, are refused."""

import json
import socket

import pytest

from actorserve.http.access.api_keys import ApiKeys
from actorserve.settings import HttpSettings
from tests.http.fakes import client_for, says

PAGE = "https://chat.example"


@pytest.mark.parametrize(
    "host",
    [
        *(
            "localhost",
            "LocalHost:8000",
            "127.0.0.1",
            "127.0.0.1:9",
            "192.0.2.7:80",
            "[::1]",
            "[::1]:8000",
            "[fe80::1]",
        ),
        *(socket.gethostname(), "api.example", "api.example:443", "API.example.", "0.0.0.0:8000"),
    ],
)
async def test_names_of_this_machine_are_served(host: str) -> None:
    """Addresses in digits, localhost, the machine's name and the operator's names are served, with any port."""
    async with client_for(says("a"), HttpSettings(allowed_hosts=("Api.Example",))) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"}, headers={"host": host})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "xlocalhost", ""),
        *("localhost:80:90", "localhost@evil.example", "[::1", "[::1]x", "[localhost]x", "127.0.0.1/", "api.example/"),
        *("0x7f.1.evil", "localhost:", "localhost:8a", "[::1]:a", "localhost,evil.example", "localhost evil.example"),
    ],
)
async def test_other_names_are_refused(host: str) -> None:
    """Every other name is a 403 in the API's form, also with a key's routes, and no request is submitted."""
    service = says("a")
    async with client_for(service, HttpSettings(allowed_hosts=("api.example",))) as client:
        answer = await client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"host": host})
        health = await client.get("/health", headers={"host": host})
    if host == "localhost:":  # an empty port is no port
        assert answer.status_code == 200
        return
    assert (answer.status_code, health.status_code) == (403, 403)
    assert answer.json()["error"]["code"] == "host_not_allowed"
    assert service.requests == []


async def test_a_page_cannot_post_without_a_content_type() -> None:
    """What any page may send without asking first, a POST of text with a foreign Host and Origin, is refused."""
    service = says("a")
    body = json.dumps({"prompt": "x"}).encode()
    async with client_for(service) as client:
        for headers in (
            {"host": "evil.example:8000", "origin": "http://evil.example:8000"},
            {"origin": "http://evil.example"},
            {"origin": "null"},
            {"origin": "http://localhost:8000"},  # another port is another origin
            {"origin": ""},
        ):
            answer = await client.post("/v1/completions", content=body, headers=headers)
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers
        anthropic = await client.post("/v1/messages", content=body, headers={"origin": "http://evil.example"})
    assert anthropic.json()["type"] == "error"
    assert service.requests == []


@pytest.mark.parametrize(
    ("settings", "headers"),
    [
        (HttpSettings(), {"origin": "http://localhost"}),
        (HttpSettings(), {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}),
        (HttpSettings(allowed_hosts=("chat.example",)), {"host": "chat.example", "origin": PAGE}),
        (HttpSettings(cors_origins=(PAGE,)), {"origin": "https://Chat.example"}),
        (HttpSettings(cors_origins=("*",)), {"origin": "null"}),
        (HttpSettings(allowed_hosts=("*",)), {"host": "evil.example"}),
        (HttpSettings(host="gpu-7.lan"), {"host": "gpu-7.lan:8000"}),
    ],
)
async def test_permitted_pages_and_names(settings: HttpSettings, headers: dict[str, str]) -> None:
    """Pages of the same host, and what the operator permits, are served."""
    async with client_for(says("a"), settings) as client:
        assert (await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)).status_code == 200


async def test_several_values_are_refused() -> None:
    """A request with two Host or two Origin headers is refused, whichever of them is right."""
    async with client_for(says("a"), api_keys=ApiKeys([])) as client:
        for headers in (
            [("host", "localhost"), ("host", "evil.example")],
            [("origin", "http://localhost"), ("origin", "http://evil.example")],
        ):
            assert (await client.post("/v1/completions", headers=headers)).status_code == 403

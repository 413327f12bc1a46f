"""Pages of other origins: who may call the API from a browser, and what the browser lets them see."""

import hashlib
from typing import Any

import httpx
import pytest

from actorserve.errors import SettingsError
from actorserve.http.access.api_keys import ApiKey, ApiKeys
from actorserve.settings import HttpSettings, load_settings
from tests.http.fakes import ScriptedService, app_for, client_for, says

PAGE = "https://chat.example"
KEY = "sk-1"
KEYS = ApiKeys([ApiKey("page", hashlib.sha256(KEY.encode()).digest(), 0, 0)])
SETTINGS = HttpSettings(cors_origins=(PAGE, "http://localhost:3000"))
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 2}


def preflight(origin: str, method: str = "POST") -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }


@pytest.mark.parametrize("keys", [None, KEYS])
async def test_a_browser_may_ask_without_a_key(keys: ApiKeys | None) -> None:
    """The preflight of a permitted page needs no key, and permits the SDKs' headers. Other pages are refused."""
    async with client_for(says("ab"), SETTINGS, keys) as client:
        allowed = await client.options("/v1/completions", headers=preflight(PAGE))
        refused = await client.options("/v1/completions", headers=preflight("https://evil.example"))
        deletes = await client.options("/v1/completions", headers=preflight(PAGE, "DELETE"))
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert "x-stainless-lang" in allowed.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in allowed.headers
    assert (refused.status_code, deletes.status_code) == (403, 400)
    assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", BODY, 200),
        ("/v1/completions", BODY | {"stream": True}, 200),
        ("/v1/completions", BODY | {"n": -1}, 400),
        ("/v1/nothing", BODY, 404),
    ],
)
async def test_answers_reach_the_page(path: str, body: dict[str, Any], status: int) -> None:
    """Answers, streams and errors carry the headers, and the page may read the request's id."""
    async with client_for(says("ab"), SETTINGS, KEYS) as client:
        headers = {"origin": PAGE, "authorization": f"Bearer {KEY}"}
        answer = await client.post(path, json=body, headers=headers)
        keyless = await client.post(path, json=body, headers={"origin": PAGE})
        other = await client.post(path, json=body, headers=headers | {"origin": "https://evil.example"})
    assert (answer.status_code, keyless.status_code) == (status, 401)
    for response in (answer, keyless):
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in response.headers["access-control-expose-headers"]
        assert "Origin" in response.headers["vary"]
    assert "access-control-allow-origin" not in other.headers


async def test_a_bug_reaches_the_page() -> None:
    """The page can also read the answer to an unexpected error."""

    class BuggyService(ScriptedService):
        @property
        def num_instances(self) -> int:
            raise KeyError

        @num_instances.setter
        def num_instances(self, _: int) -> None: ...

    transport = httpx.ASGITransport(app_for(BuggyService(), SETTINGS), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get("/health", headers={"origin": PAGE})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (500, PAGE)


async def test_no_page_is_permitted_by_default() -> None:
    """Without the setting, no answer carries the headers; with ``*``, every answer does."""
    async with client_for(says("ab")) as client:
        answer = await client.post("/v1/completions", json=BODY, headers={"origin": PAGE})
        asked = await client.options("/v1/completions", headers=preflight(PAGE))
    assert not [name for name in (*answer.headers, *asked.headers) if name.startswith("access-control")]
    async with client_for(says("ab"), HttpSettings(cors_origins=("*",))) as client:
        answer = await client.post("/v1/completions", json=BODY, headers={"origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://chat.example/page", ""])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    """An origin is a scheme and a host, without a path; a setting that could never match is an error."""
    with pytest.raises(SettingsError, match=r"http\.cors_origins"):
        load_settings(None, {"http": {"cors_origins": [origin]}})

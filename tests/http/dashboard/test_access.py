"""Who may watch: the page's files are for everyone, and its stream for viewers and operators if there are keys."""

import asyncio
import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest

from actorserve.errors import SettingsError
from actorserve.http.access.api_keys import ApiKeys, read_api_keys
from actorserve.http.dashboard import endpoints
from actorserve.http.dashboard.endpoints import FILE_PATHS
from tests.http.fakes import DEADLINE_S, app_for, client_for, says, serving
from tests.sources import ROOT

EVENTS = "/dashboard/events"


def keys_in(folder: Path, role: str) -> ApiKeys:
    """The key ``secret`` with this role."""
    file = folder / "keys.toml"
    digest = hashlib.sha256(b"secret").hexdigest()
    file.write_text(f'[[key]]\nname = "wall"\nsha256 = "{digest}"\n{role}\n')
    file.chmod(0o600)
    return read_api_keys(file)


async def first_event(url: str, headers: dict[str, str]) -> tuple[int, str]:
    """The status, and the first line of the stream or the error's code."""
    async with (
        asyncio.timeout(DEADLINE_S),
        httpx.AsyncClient(timeout=DEADLINE_S) as client,
        client.stream("GET", url + EVENTS, headers=headers) as answer,
    ):
        if answer.status_code != httpx.codes.OK:
            return answer.status_code, json.loads(await answer.aread())["error"]["code"]
        assert answer.headers["content-type"].startswith("text/event-stream")
        return 200, await anext(answer.aiter_lines())


@pytest.mark.parametrize(
    ("role", "headers", "expected"),
    [
        ("", {}, (401, "invalid_api_key")),
        ("", {"authorization": "Bearer wrong"}, (401, "invalid_api_key")),
        ("", {"authorization": "Bearer secret"}, (403, "key_may_not_watch")),
        ('role = "user"', {"authorization": "Bearer secret"}, (403, "key_may_not_watch")),
        ('role = "viewer"', {"authorization": "Bearer secret"}, (200, "event: points")),
        ('role = "operator"', {"x-api-key": "secret"}, (200, "event: points")),
    ],
)
async def test_keys_with_a_role_may_watch(
    tmp_path: Path, role: str, headers: dict[str, str], expected: tuple[int, str]
) -> None:
    """Without a key 401, with a user's 403; a viewer and an operator get the stream."""
    async with serving(app_for(says("x"), api_keys=keys_in(tmp_path, role))) as (url, _):
        assert await first_event(url, headers) == expected


async def test_without_keys_everyone_may_watch() -> None:
    """The page is open as the API is."""
    async with serving(app_for(says("x"))) as (url, _):
        assert await first_event(url, {}) == (200, "event: points")


@pytest.mark.parametrize(("role", "status"), [("viewer", 403), ("operator", 200), ("user", 200)])
async def test_a_viewers_key_makes_no_requests(tmp_path: Path, role: str, status: int) -> None:
    """A key that hangs on a wall cannot use the model, but may read what all keys may."""
    headers = {"authorization": "Bearer secret"}
    async with client_for(says("x"), api_keys=keys_in(tmp_path, f'role = "{role}"')) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        assert answer.status_code == status
        if status != 200:
            assert answer.json()["error"]["code"] == "key_may_only_read"
        assert (await client.get("/metrics", headers=headers)).status_code == 200


def test_an_unknown_role_is_refused(tmp_path: Path) -> None:
    """The error names the field and the roles."""
    with pytest.raises(SettingsError, match=r"key\.0\.role.*'user', 'viewer' or 'operator'"):
        keys_in(tmp_path, 'role = "admin"')


async def test_the_files_are_for_everyone(tmp_path: Path) -> None:
    """Every file of the page is served without a key, as what it is, and may load nothing from elsewhere."""
    kinds: dict[str, Any] = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", "": "text/html"}
    folder = Path(endpoints.__file__).parent / "page"
    assert {Path(path).name for path in FILE_PATHS[1:]} | {"index.html"} == {file.name for file in folder.iterdir()}
    async with client_for(says("x"), api_keys=keys_in(tmp_path, "")) as client:
        for path in FILE_PATHS:
            answer = await client.get(path)
            assert answer.status_code == 200, path
            assert answer.headers["content-type"].startswith(kinds[Path(path).suffix])
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        secret = {"authorization": "Bearer secret"}
        for path in ("/dashboard/index.html", "/dashboard/..%2fendpoints.py", "/dashboard/other.js"):
            assert (await client.get(path, headers=secret)).status_code == 404


async def test_so_many_pages_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page beyond the limit gets 503, and there is room again once a page is closed."""
    monkeypatch.setattr(endpoints, "MAX_PAGES", 1)
    async with serving(app_for(says("x"))) as (url, _), httpx.AsyncClient(timeout=DEADLINE_S) as client:
        async with client.stream("GET", url + EVENTS) as first:
            await anext(first.aiter_lines())
            assert await first_event(url, {}) == (503, "too_many_pages")
        async with asyncio.timeout(DEADLINE_S):
            while (await first_event(url, {}))[0] != 200:
                pass


def test_an_installed_package_has_the_files() -> None:
    """The project's package data covers every file of the page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folder = Path(endpoints.__file__).parent
    covered = {
        file
        for pattern in project["tool"]["setuptools"]["package-data"]["actorserve.http.dashboard"]
        for file in folder.glob(pattern)
    }
    assert covered == set((folder / "page").iterdir())

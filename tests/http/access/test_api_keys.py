"""API keys: the allowed requests, their priorities, and the errors of refused requests."""

import hashlib
import logging
import os
import time
from pathlib import Path

import openai
import pytest
from starlette.types import Message, Scope

from actorserve import logs
from actorserve.cli import main
from actorserve.core.messages import LoadReport
from actorserve.errors import SettingsError
from actorserve.http.access.api_keys import ApiKeys, read_api_keys
from actorserve.http.access.authentication import Authentication
from actorserve.http.access.key_limits import KeyLimits
from actorserve.http.access.open_requests import OpenRequests
from actorserve.http.host_counts import HostCounts
from actorserve.http.metrics.metrics import Metrics
from tests.http.fakes import DEADLINE_S, MODEL, ScriptedService, app_for, client_for, says, serving

SECRET = "0c9e5e6f-a-long-random-key"
OTHER = "another-long-random-key"
KEYS = f"""
[[key]]
name = "team-a"
sha256 = "{hashlib.sha256(SECRET.encode()).hexdigest()}"
priority = 2
best_priority = -1

[[key]]
name = "team-b"
sha256 = "{hashlib.sha256(OTHER.encode()).hexdigest().upper()}"
"""
CLOSED_ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/openapi.json"),
    ("GET", f"/v1/models/{MODEL}"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("GET", "/"),
]


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "keys.toml"
    file.write_text(text, encoding="utf-8")
    file.chmod(mode)
    return file


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    return read_api_keys(written(tmp_path, KEYS))


@pytest.mark.parametrize(("method", "path"), CLOSED_ROUTES)
async def test_every_route_but_health_needs_a_key(keys: ApiKeys, method: str, path: str) -> None:
    """Without a key every path except /health is a 401 in the API's format, with any Host header that is allowed."""
    service = says("a")
    async with client_for(service, api_keys=keys) as client:
        for headers in ({}, {"host": "127.0.0.1"}, {"host": "localhost:8000"}):
            response = await client.request(method, path, headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert response.json()["error"]["code"] == "invalid_api_key"
        for host in ("gateway/health", "x?/health"):
            assert (await client.request(method, path, headers={"host": host})).status_code == 403
        assert (await client.get("/health")).status_code == 200
    assert service.requests == []


@pytest.mark.parametrize(
    "values",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [SECRET.encode()],
        [b"Basic " + SECRET.encode()],
        [b"Bearer" + SECRET.encode()],
        [b"Bearer x" + SECRET.encode()],
        [b"Bearer " + SECRET.encode()[:-1]],
        [b"Bearer " + SECRET.encode() + b" x"],
        [b"Bearer " + hashlib.sha256(SECRET.encode()).hexdigest().encode()],
        [b"Bearer \xff\xfe\x00\xe4"],
        ["Bearer schlüssel".encode()],
        [b"Bearer " + b"x" * 2**20],
        [b"Bearer " + SECRET.encode()] * 2,
        [b"Bearer " + SECRET.encode(), b"Bearer wrong"],
    ],
)
async def test_wrong_keys_all_get_the_same_answer(keys: ApiKeys, values: list[bytes]) -> None:
    """Every wrong header gets the same answer, byte for byte, and no request is submitted."""
    service = says("a")
    async with client_for(service, api_keys=keys) as client:
        wrong = await client.get("/v1/models", headers={"authorization": "Bearer wrong"})
        headers = [(b"authorization", value) for value in values]
        response = await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert (response.status_code, response.content) == (401, wrong.content)
    assert service.requests == []


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer  "])
async def test_a_right_key_opens_everything(keys: ApiKeys, scheme: str) -> None:
    """A request with a valid key is served; the scheme's case does not matter."""
    async with client_for(says("a"), api_keys=keys) as client:
        for method, path in CLOSED_ROUTES[2:6]:
            response = await client.request(method, path, headers={"authorization": f"{scheme} {OTHER}"})
            assert response.status_code == 200
        unknown = await client.get("/v1/nothing", headers={"authorization": f"{scheme} {SECRET}"})
    assert unknown.status_code == 404


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    ("secret", "asked", "priority"),
    [
        (SECRET, None, 2),
        (SECRET, 0, 0),
        (SECRET, -1, -1),
        (SECRET, 2**31 - 1, 2**31 - 1),
        (SECRET, -2, None),
        (OTHER, None, 0),
        (OTHER, 0, 0),
        (OTHER, -1, None),
    ],
)
async def test_keys_bound_priorities(
    keys: ApiKeys, endpoint: str, secret: str, asked: int | None, priority: int | None
) -> None:
    """A request without a priority gets its key's priority. A more urgent one than the key allows is a 403.

    Its worker hears the key's name.
    """
    service = says("a")
    prompt = {"prompt": "x"} if endpoint == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    async with client_for(service, api_keys=keys) as client:
        response = await client.post(
            f"/v1/{endpoint}", json=prompt | {"priority": asked}, headers={"authorization": f"Bearer {secret}"}
        )
    if priority is None:
        assert response.status_code == 403
        assert (response.json()["error"]["param"], response.json()["error"]["code"]) == (
            "priority",
            "priority_not_allowed",
        )
        assert service.requests == []
    else:
        assert response.status_code == 200
        name = "team-a" if secret == SECRET else "team-b"
        assert [(spec.priority, spec.client) for spec in service.specs] == [(priority, name)]


@pytest.mark.parametrize(("asked", "priority"), [(None, 0), (-(2**31), -(2**31)), (2**31 - 1, 2**31 - 1)])
async def test_without_keys_any_priority_may_be_had(asked: int | None, priority: int) -> None:
    """Without keys every 32-bit priority is granted; requests without a priority get 0."""
    service = says("a")
    async with client_for(service) as client:
        assert (await client.post("/v1/completions", json={"prompt": "x", "priority": asked})).status_code == 200
    assert [(spec.priority, spec.client) for spec in service.specs] == [(priority, "")]


async def test_websockets_are_closed(keys: ApiKeys) -> None:
    """A websocket is always closed."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def app(scope: Scope, *_: object) -> None:
        raise AssertionError("let through")

    counts = HostCounts()
    metrics = Metrics(says(""), time.monotonic, counts)
    guard = Authentication(app, keys, OpenRequests(counts), KeyLimits(counts, time.monotonic), metrics)
    await guard({"type": "websocket", "path": "/health", "headers": []}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_the_sdk_shows_its_key(keys: ApiKeys, caplog: pytest.LogCaptureFixture) -> None:
    """Over a real connection the official SDK's key is valid, a wrong key raises, and no log has either key."""
    caplog.set_level(logging.DEBUG, logger="actorserve")
    async with serving(app_for(says("abc"), api_keys=keys)) as (url, _):

        def client(secret: str) -> openai.AsyncOpenAI:
            return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=0, timeout=DEADLINE_S)

        async with client(SECRET) as right, client("wrong-key") as wrong:
            answer = await right.completions.create(model=MODEL, prompt="x")
            with pytest.raises(openai.AuthenticationError):
                await wrong.completions.create(model=MODEL, prompt="x")
            with pytest.raises(openai.PermissionDeniedError):
                await right.completions.create(model=MODEL, prompt="x", extra_body={"priority": -5})
    assert answer.choices[0].text == "abc"
    said = " ".join(record.getMessage() for record in caplog.records if record.name.startswith("actorserve"))
    assert SECRET not in said
    assert "wrong-key" not in said


async def test_a_bug_behind_a_key_logs_no_key(keys: ApiKeys, caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected error of a request is logged without its key."""

    class Broken(ScriptedService):
        def shown_loads(self) -> dict[str, LoadReport]:
            raise RuntimeError("broken")

    async with (
        serving(app_for(Broken(), api_keys=keys)) as (url, _),
        openai.AsyncOpenAI(base_url=url, api_key=SECRET, max_retries=0) as client,
    ):
        with pytest.raises(openai.InternalServerError):
            await client.get("/metrics", cast_to=str)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("actorserve")]
    assert any("broken" in line for line in said)
    assert all(SECRET not in line for line in said)


HASH = hashlib.sha256(b"x").hexdigest()


def entry(*lines: str) -> str:
    return "\n".join(["[[key]]", *lines, ""])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "key"),
        ("key = []\n", "key"),
        ("[[key]\n", "TOML"),
        (entry('name = "a"'), "sha256"),
        (entry('name = "a"', f'key = "{SECRET}"'), "key.0.key"),
        (entry('name = "a"', f'sha256 = "{SECRET}"'), "key.0.sha256"),
        (entry('name = "a"', f'sha256 = "{hashlib.sha256(b"").hexdigest()}"'), "the hash of an empty text"),
        (entry('name = ""', f'sha256 = "{HASH}"'), "key.0.name"),
        (entry('name = "a"', f'sha256 = "{HASH}"', "priority = true"), "key.0.priority"),
        (entry('name = "a"', f'sha256 = "{HASH}"', f"priority = {2**31}"), "key.0.priority"),
        (entry('name = "a"', f'sha256 = "{HASH}"', "best_priority = 1"), "best_priority"),
        (entry('name = "a"', f'sha256 = "{HASH}"') + entry('name = "b"', f'sha256 = "{HASH.upper()}"'), "same sha256"),
        (entry('name = "a"', f'sha256 = "{HASH}"') + entry('name = "a"', f'sha256 = "{"0" * 64}"'), "same name"),
    ],
)
def test_mistakes_are_named_in_one_line(tmp_path: Path, text: str, named: str) -> None:
    """A wrong file is refused with one line that names the file and the mistake, and repeats no secret."""
    file = written(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        read_api_keys(file)
    message = str(caught.value)
    assert "\n" not in message
    assert str(file) in message
    assert named in message
    assert SECRET not in message
    assert HASH not in message


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644])
def test_files_of_others_are_refused(tmp_path: Path, mode: int) -> None:
    """A file that other users may read or write is refused, and the error says what to do."""
    with pytest.raises(SettingsError, match="chmod 600"):
        read_api_keys(written(tmp_path, KEYS, mode))


@pytest.mark.parametrize(("owner", "is_taken"), [(1000, True), (0, True), (1001, False)])
def test_files_that_belong_to_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, is_taken: bool
) -> None:
    """The file must belong to this user or to root, because any other owner could add keys."""
    file = written(tmp_path, KEYS)
    shown = os.stat_result((0o100600, 0, 0, 1, owner, 0, 0, 0, 0, 0))
    monkeypatch.setattr("actorserve.http.access.api_keys.os.geteuid", lambda: 1000)
    monkeypatch.setattr("actorserve.http.access.api_keys.os.fstat", lambda _: shown)
    if is_taken:
        assert read_api_keys(file).find(SECRET.encode()) is not None
    else:
        with pytest.raises(SettingsError, match="must belong to this user or to root"):
            read_api_keys(file)


async def test_keys_are_reloaded(tmp_path: Path) -> None:
    """After a reload a new key is valid and a removed one is not; a wrong file changes nothing."""
    keys = read_api_keys(written(tmp_path, KEYS))
    new = entry('name = "new"', f'sha256 = "{hashlib.sha256(b"new").hexdigest()}"', "requests_per_minute = 5")
    async with client_for(says("a"), api_keys=keys) as client:

        async def status(secret: str) -> int:
            return (await client.get("/v1/models", headers={"x-api-key": secret})).status_code

        assert (await status(SECRET), await status("new")) == (200, 401)
        written(tmp_path, new)
        assert (await status(SECRET), await status("new")) == (200, 401)
        keys.reload()
        assert (await status(SECRET), await status("new"), len(keys)) == (401, 200, 1)
        for broken in ("[[key]", "", new + new):
            written(tmp_path, broken)
            with pytest.raises(SettingsError):
                keys.reload()
        written(tmp_path, KEYS, 0o644)
        with pytest.raises(SettingsError):
            keys.reload()
        assert (await status(SECRET), await status("new")) == (401, 200)


def test_the_server_does_not_start_with_bad_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose key file is missing or readable by other users ends at once, with one line."""
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # the root logger belongs to pytest

    def told(keys_file: Path) -> str:
        config = tmp_path / "config.toml"
        config.write_text(f'[http]\napi_keys_file = "{keys_file}"\n', encoding="utf-8")
        assert main(["serve", "--port", "0", "--device", "cpu", "--config", str(config)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert str(tmp_path / "absent.toml") in told(tmp_path / "absent.toml")
    assert "chmod 600" in told(written(tmp_path, KEYS, 0o644))

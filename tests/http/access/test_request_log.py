"""The log has one line for each request, which tells all that an operator asks about it."""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from actorserve.core.effects import Deliver, End
from actorserve.core.messages import Energy, FinishReason, RefusalReason, RequestSpec
from actorserve.http.access.api_keys import ApiKey, ApiKeys
from actorserve.logs import JsonLines, TextLines
from tests.http.fakes import (
    DEADLINE_S,
    MODEL,
    ScriptedService,
    app_for,
    client_for,
    delivered,
    end,
    refuses,
    says,
    serving,
)

KEYS = ApiKeys([ApiKey("team a", hashlib.sha256(b"right").digest(), 0, 0)])


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """Returns the requests' lines so far, as they are written under systemd."""
    caplog.set_level(logging.DEBUG, logger="actorserve.requests")

    def read() -> list[dict[str, Any]]:
        records = [record for record in caplog.records if record.name == "actorserve.requests"]
        for record in records:
            assert TextLines("gateway-0").format(record).isprintable()
        return [json.loads(JsonLines("gateway-0").format(record)) for record in records]

    return read


Lines = Callable[[], list[dict[str, Any]]]


def moved(_: RequestSpec) -> list[Deliver | End]:
    """Three tokens, of which the last one is another worker's."""
    return [
        replace(delivered("ab"), num_cached_tokens=1, worker="worker-0", queued_s=0.0),
        replace(delivered("c"), worker="worker-1"),
        end(FinishReason.STOP),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_tells_everything_of_a_request(lines: Lines, stream: bool) -> None:
    """Id, key, model, tokens, times, end and workers stand in one line, and neither prompt nor answer nor key."""
    async with client_for(ScriptedService(moved), api_keys=KEYS) as client:
        client.headers.update({"authorization": "Bearer right", "x-request-id": "mine-7"})
        body = {"prompt": "secret prompt", "stream": stream, "n": 2}
        await client.post("/v1/completions?token=hidden", json=body)
    (line,) = lines()
    assert {name: value for name, value in line.items() if not name.endswith("_s") and name != "time"} == {
        "level": "info",
        "process": "gateway-0",
        "logger": "actorserve.requests",
        "message": "POST /v1/completions",
        "request_id": "mine-7",
        "status": 200,
        "client": "127.0.0.1:123",
        "key": "team a",
        "model": MODEL,
        "prompt_tokens": 26,
        "cached_tokens": 2,
        "output_tokens": 6,
        "ended": "stop",
        "workers": ["worker-0", "worker-1"],
        "stream": stream,
    }
    assert "prompt_joules" not in line, "they are not known"
    times = [line[name] for name in ("queued_s", "prefill_s", "decode_s", "ttft_s", "e2e_s")]
    assert all(isinstance(seconds, float) and 0.0 <= seconds <= line["e2e_s"] < DEADLINE_S for seconds in times)


async def test_a_line_tells_the_joules_of_all_choices(lines: Lines) -> None:
    """What workers spent is told by phase, where they know it."""
    ended = replace(end(FinishReason.STOP), energy=Energy(1.25, 3.0))
    async with client_for(ScriptedService(lambda _: [delivered("ab"), ended])) as client:
        await client.post("/v1/completions", json={"prompt": "a", "n": 2})
    (line,) = lines()
    assert (line["prompt_joules"], line["token_joules"]) == (2.5, 6.0)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "error"),
    [
        ("POST", "/v1/completions", {"prompt": "x", "max_tokens": -1}, 400, None, "max_tokens"),
        ("POST", "/v1/completions", {"prompt": "x", "model": "other"}, 404, "model_not_found", "model"),
        ("GET", "/nothing%0A%1B[2J", None, 404, "not_found", "route"),
        ("GET", "/v1/completions", None, 405, "method_not_allowed", "GET"),
        ("POST", "/v1/messages", {"messages": 3}, 400, None, "messages"),
    ],
)
async def test_a_refusal_tells_its_reason(
    lines: Lines, method: str, path: str, body: object, status: int, code: str | None, error: str
) -> None:
    """The line of a 4xx has the message that the client got, and its code, on one line whatever the client sent."""
    async with client_for(ScriptedService()) as client:
        await client.request(method, path, json=body)
    (line,) = lines()
    assert (line["status"], line.get("error_code")) == (status, code)
    assert error in line["error"]
    assert line["level"] == "info"
    assert "model" not in line


async def test_a_wrong_key_is_told_without_the_key(lines: Lines) -> None:
    """A 401 has a line, which does not have what the client sent as its key."""
    async with client_for(ScriptedService(), api_keys=KEYS) as client:
        await client.post("/v1/completions", headers={"authorization": "Bearer wrong-key"})
    (line,) = lines()
    assert (line["status"], line["error_code"]) == (401, "invalid_api_key")
    assert "wrong-key" not in json.dumps(line)


async def test_overload_is_a_warning(lines: Lines) -> None:
    """A request that no worker could take is logged as a warning, with the reason."""
    async with client_for(refuses(RefusalReason.NO_INSTANCE)) as client:
        await client.post("/v1/completions", json={"prompt": "x"})
    (line,) = lines()
    assert (line["level"], line["status"], line["error_code"], line["ended"]) == (
        "warning",
        503,
        "no_instance",
        "error",
    )


async def test_what_programs_ask_often_is_a_debug_line(lines: Lines) -> None:
    """Health checks and scrapes that are answered well do not fill the log; those that fail are warnings."""
    service = ScriptedService()
    async with client_for(service) as client:
        for path in ("/health", "/ping", "/metrics", "/version"):
            await client.get(path)
        service.num_instances = 0
        await client.get("/health")
    assert [line["level"] for line in lines()] == ["debug", "debug", "debug", "info", "warning"]


async def test_a_client_that_leaves_is_told(lines: Lines) -> None:
    """The line of a request whose client left says so, with the tokens that were made."""
    service = ScriptedService()
    async with serving(app_for(service)) as (url, _), httpx.AsyncClient(timeout=DEADLINE_S) as client:
        body = {"prompt": "x", "stream": True}
        async with client.stream(
            "POST", f"{url}/v1/completions", json=body, headers={"x-request-id": "gone"}
        ) as answer:
            request = await service.request()
            request.feed([delivered("ab")])
            async for _ in answer.aiter_lines():
                break
        await request.released.wait()
    (line,) = lines()
    assert (line["request_id"], line["ended"], line["output_tokens"]) == ("gone", "client left", 2)


async def test_workers_know_a_request_by_the_id_that_its_client_sent() -> None:
    """A worker request's id begins with the client's id, and is new even if the client sends its id twice."""
    service = says("a")
    async with client_for(service) as client:
        for _ in range(2):
            await client.post("/v1/completions", json={"prompt": "x", "n": 2}, headers={"x-request-id": "mine"})
        answer = await client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "not acceptable"})
    names = [spec.request_id for spec in service.specs]
    assert len(set(names)) == 5
    assert all(name.startswith("mine.") for name in names[:4])
    assert names[4] == f"{answer.headers['x-request-id']}-0"

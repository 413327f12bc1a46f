"""Everything except the answers: unknown routes, request ids, health, metrics, and bugs."""

import logging
import re
from collections.abc import Mapping
from dataclasses import replace

import httpx
import pytest

from actorserve import __version__
from actorserve.core.messages import FinishReason, LoadReport, RequestSpec
from actorserve.http.app import create_app
from actorserve.http.stream import AnswerStream
from actorserve.settings import HttpSettings
from tests.http.fakes import (
    CONTEXT_TOKENS,
    DESCRIPTION,
    MODEL,
    TOKENIZER,
    ScriptedService,
    app_for,
    client_for,
    delivered,
    end,
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
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
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


class TickingClock:
    """A clock that advances by one second at every reading."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


async def test_metrics() -> None:
    """Loads, tokens, endings and latencies have the names that dashboards know."""
    service = ScriptedService(
        lambda _: [replace(delivered("ab"), num_cached_tokens=2), delivered("cd"), end(FinishReason.STOP)]
    )
    app = create_app(service, TOKENIZER, None, DESCRIPTION, HttpSettings(), clock=TickingClock())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        await client.post("/v1/completions", json={"prompt": "xyz"})
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    lines = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    worker = f'{{engine="worker-0",model_name="{MODEL}"}}'
    gateway = f'{{engine="gateway",model_name="{MODEL}"}}'
    assert float(lines[f"vllm:num_requests_running{worker}"]) == 1
    assert float(lines[f"vllm:num_requests_waiting{worker}"]) == 2
    assert float(lines[f"vllm:kv_cache_usage_perc{worker}"]) == 0.25
    assert float(lines[f"vllm:num_preemptions_total{worker}"]) == 3
    assert float(lines[f"vllm:prefix_cache_queries_total{worker}"]) == 50
    assert float(lines[f"vllm:prefix_cache_hits_total{worker}"]) == 20
    assert float(lines[f"actorserve_host_kv_usage{worker}"]) == 0.75
    assert float(lines[f"actorserve_requests_swapped{worker}"]) == 5
    assert float(lines[f"actorserve_swap_outs_total{worker}"]) == 7
    assert float(lines[f"actorserve_swapped_bytes_total{worker}"]) == 1100
    assert float(lines[f"actorserve_swap_blocked_seconds_total{worker}"]) == 0.25
    assert float(lines[f"actorserve_virtual_usage{worker}"]) == 0.5
    assert float(lines[f"actorserve_requests_migrating{worker}"]) == 6
    assert float(lines[f"actorserve_migrations_total{worker}"]) == 8
    assert float(lines[f"actorserve_migrations_failed_total{worker}"]) == 9
    assert float(lines[f"actorserve_migrated_bytes_total{worker}"]) == 1200
    assert float(lines[f"actorserve_checkpointed_bytes_total{worker}"]) == 1300
    assert float(lines[f"vllm:prompt_tokens_total{gateway}"]) == 3
    assert float(lines[f"vllm:prompt_tokens_cached_total{gateway}"]) == 2
    assert float(lines[f"vllm:generation_tokens_total{gateway}"]) == 4
    success = f'{{engine="gateway",finished_reason="stop",model_name="{MODEL}"}}'
    assert float(lines[f"vllm:request_success_total{success}"]) == 1
    assert float(lines[f"vllm:time_to_first_token_seconds_sum{gateway}"]) == 1
    assert float(lines[f"vllm:inter_token_latency_seconds_sum{gateway}"]) == 1
    assert float(lines[f"vllm:e2e_request_latency_seconds_sum{gateway}"]) == 3
    assert float(lines["actorserve_protocol_errors_total"]) == 4
    assert float(lines["actorserve_instances"]) == 1


class IdleService(ScriptedService):
    """A service before any worker has come up."""

    def __init__(self) -> None:
        super().__init__()
        self.model = None
        self.num_instances = 0

    def loads(self) -> Mapping[str, LoadReport]:
        return {}


async def test_metrics_before_a_worker() -> None:
    """The page is served before any worker has come up."""
    async with client_for(IdleService()) as client:
        response = await client.get("/metrics")
    assert response.status_code == 200
    assert "actorserve_instances 0.0" in response.text


async def test_context_is_told() -> None:
    """An error about length names the context's size."""
    async with client_for(ScriptedService()) as client:
        response = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": CONTEXT_TOKENS})
    assert f"context of {CONTEXT_TOKENS} tokens" in response.json()["error"]["message"]

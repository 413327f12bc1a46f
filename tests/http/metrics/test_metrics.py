"""The page that Prometheus reads: its names, and what they count."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from actorserve.core.messages import FinishReason, LoadReport, PowerReading
from actorserve.http.access.api_keys import ApiKey, ApiKeys
from actorserve.http.app import create_app
from actorserve.http.host_counts import HostCounts
from actorserve.http.metrics.metrics import Metrics
from actorserve.http.metrics.names import RESTARTS
from actorserve.settings import HttpSettings
from tests.http.fakes import DESCRIPTION, MODEL, TOKENIZER, ScriptedService, client_for, delivered, end, load, says


class TickingClock:
    """A clock that advances by one second at every reading."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


async def test_metrics() -> None:
    """Loads, tokens, endings and latencies have the names that dashboards know."""
    first = replace(delivered("ab"), num_cached_tokens=2, queued_s=0.25)
    service = ScriptedService(lambda _: [first, delivered("cd"), end(FinishReason.STOP)])
    service.num_unplaced = 7
    service.coordinator_term = 21
    app = create_app(service, TOKENIZER, None, DESCRIPTION, HttpSettings(), clock=TickingClock())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        await client.post("/v1/completions", json={"prompt": "xyz"})
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    lines = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    worker = f'{{engine="worker-0",model_name="{MODEL}"}}'
    gateway = f'{{engine="gateway",model_name="{MODEL}"}}'
    assert float(lines[f"vllm:num_requests_running{worker}"]) == 1
    assert float(lines[f"vllm:num_requests_waiting{worker}"]) == 4
    assert float(lines[f"vllm:num_requests_waiting{gateway}"]) == 7
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
    assert float(lines[f"actorserve_power_watts{worker}"]) == 345.5
    assert f"actorserve_energy_joules_total{worker}" not in lines, "it is not known"
    assert float(lines[f"vllm:prompt_tokens_total{gateway}"]) == 3
    assert float(lines[f"vllm:prompt_tokens_cached_total{gateway}"]) == 2
    assert float(lines[f"vllm:generation_tokens_total{gateway}"]) == 4
    success = f'{{engine="gateway",finished_reason="stop",model_name="{MODEL}"}}'
    assert float(lines[f"vllm:request_success_total{success}"]) == 1
    assert float(lines[f"vllm:time_to_first_token_seconds_sum{gateway}"]) == 1
    assert float(lines[f"vllm:inter_token_latency_seconds_sum{gateway}"]) == 1
    assert float(lines[f"vllm:e2e_request_latency_seconds_sum{gateway}"]) == 3
    assert float(lines[f"vllm:request_queue_time_seconds_sum{gateway}"]) == 0.25
    assert float(lines[f"vllm:request_prefill_time_seconds_sum{gateway}"]) == 0.75
    assert float(lines[f"vllm:request_decode_time_seconds_sum{gateway}"]) == 1
    assert float(lines[f"vllm:request_inference_time_seconds_sum{gateway}"]) == 1.75
    assert float(lines[f"vllm:time_per_output_token_seconds_sum{gateway}"]) == 1
    assert float(lines[f"vllm:request_time_per_output_token_seconds_sum{gateway}"]) == pytest.approx(1 / 3)
    assert float(lines[f"vllm:request_prompt_tokens_sum{gateway}"]) == 3
    assert float(lines[f"vllm:request_generation_tokens_sum{gateway}"]) == 4
    assert float(lines[f"vllm:request_max_num_generation_tokens_sum{gateway}"]) == 4
    config = f'block_size="16",engine="worker-0",model_name="{MODEL}",num_cpu_blocks="200",num_gpu_blocks="100"'
    assert float(lines[f"vllm:cache_config_info{{{config}}}"]) == 1
    assert float(lines[f"vllm:gpu_cache_usage_perc{worker}"]) == 0.25
    assert float(lines["actorserve_protocol_errors_total"]) == 4
    assert float(lines["actorserve_instances"]) == 1
    assert float(lines["actorserve_coordinator_term"]) == 21


class IdleService(ScriptedService):
    """A service before any worker has come up."""

    def __init__(self) -> None:
        super().__init__()
        self.model = None
        self.num_instances = 0

    def shown_loads(self) -> Mapping[str, LoadReport]:
        return {}


class MeteredService(ScriptedService):
    """A service whose worker knows its energy."""

    def shown_loads(self) -> Mapping[str, LoadReport]:
        report = replace(load(), num_output_tokens=200, prompt_energy_j=12.5, token_energy_j=20.0)
        return {"worker-0": replace(report, power=PowerReading("GPU-0", 345.5, 40.0))}


async def test_energy_is_told_by_phase_and_per_token() -> None:
    """Joules of prompts and of tokens are counters of each instance, beside its tokens per joule."""
    async with client_for(MeteredService()) as client:
        response = await client.get("/metrics")
    lines = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    worker = f'{{engine="worker-0",model_name="{MODEL}"}}'
    assert float(lines[f"actorserve_energy_joules_total{worker}"]) == 40.0
    assert float(lines[f"actorserve_prompt_energy_joules_total{worker}"]) == 12.5
    assert float(lines[f"actorserve_token_energy_joules_total{worker}"]) == 20.0
    assert float(lines[f"actorserve_tokens_per_joule{worker}"]) == 5.0


async def test_metrics_before_a_worker() -> None:
    """The page is served before any worker has come up."""
    async with client_for(IdleService()) as client:
        response = await client.get("/metrics")
    assert response.status_code == 200
    assert "actorserve_instances 0.0" in response.text


def value(page: str, name: str, **labels: str) -> float:
    """The value of one sample; 0 if it is not on the page."""
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    return 0.0


async def test_the_page_is_well_formed() -> None:
    """Every family stands once on the page, with its type and a text."""
    async with client_for(says("ok")) as client:
        await client.post("/v1/completions", json={"prompt": "x"})
        page = (await client.get("/metrics")).text
    types = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(set(types)) == len(types)
    assert all(family.documentation for family in text_string_to_metric_families(page))


async def test_statuses_and_the_use_of_keys_are_counted() -> None:
    """Answers are counted by status, and requests and tokens by the name of their key."""
    keys = ApiKeys([ApiKey("team", hashlib.sha256(b"right").digest(), 0, 0)])
    async with client_for(says("hello"), api_keys=keys) as client:
        await client.post("/v1/completions", json={"prompt": "xyz"})
        client.headers["authorization"] = "Bearer right"
        await client.post("/v1/completions", json={"prompt": "xyz"})
        await client.post("/v1/completions", json={"prompt": "xyz", "max_tokens": -1})
        page = (await client.get("/metrics")).text
    for status in ("200", "400", "401"):
        assert value(page, "actorserve_http_responses_total", status=status) == 1
    assert value(page, "actorserve_key_requests_total", key="team") == 2
    assert value(page, "actorserve_key_prompt_tokens_total", key="team") == 3
    assert value(page, "actorserve_key_generation_tokens_total", key="team") == 1
    assert "right" not in page


def test_gateways_of_a_host_tell_its_sums(tmp_path: Path) -> None:
    """Requests without a worker are summed over the host's gateways, and its supervisor's restarts are told by all."""
    one, other = ScriptedService(), ScriptedService()
    pages = [
        Metrics(service, lambda: 0.0, HostCounts(tmp_path, name)) for service, name in ((one, "gw-0"), (other, "gw-1"))
    ]
    supervisor = HostCounts(tmp_path, "supervisor")
    supervisor.values[supervisor.cell((RESTARTS, "worker-0"))] += 2
    one.num_unplaced, other.num_unplaced = 3, 4
    for metrics in pages:
        metrics.share()
    for metrics in pages:
        page = metrics.render().decode()
        assert value(page, "vllm:num_requests_waiting", engine="gateway", model_name=MODEL) == 7
        assert value(page, f"{RESTARTS}_total", process="worker-0") == 2


async def test_the_longest_choice_is_counted_once() -> None:
    """Of the choices of an answer the longest counts as the answer's number of generated tokens."""
    service = ScriptedService(lambda spec: [delivered("ab" * (1 + int(spec.request_id[-1]))), end(FinishReason.STOP)])
    async with client_for(service) as client:
        await client.post("/v1/completions", json={"prompt": "x", "n": 3})
        page = (await client.get("/metrics")).text
    labels = {"engine": "gateway", "model_name": MODEL}
    assert value(page, "vllm:request_max_num_generation_tokens_sum", **labels) == 6
    assert value(page, "vllm:request_max_num_generation_tokens_count", **labels) == 1
    assert value(page, "vllm:request_generation_tokens_count", **labels) == 3

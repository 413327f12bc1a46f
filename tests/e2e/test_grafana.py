"""The dashboards for Grafana: every query names metrics and labels that a running server shows, ours and vLLM's."""

import hashlib
import json
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server import ROOT, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.model]

SECRET = "a-key-of-few-requests"
HEADERS = {"authorization": f"Bearer {SECRET}"}
NUM_REQUESTS = 4
CONFIG = """
[http]
api_keys_file = "{keys}"
[cluster]
[workers]
count = 2
engine = "fake"
"""
DASHBOARD = ROOT / "config" / "dashboards" / "grafana.json"
OF_VLLM = (
    *("vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_sum"),
    *("vllm:e2e_request_latency_seconds_count", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    *("vllm:inter_token_latency_seconds_bucket", "vllm:inter_token_latency_seconds_sum"),
    *("vllm:inter_token_latency_seconds_count", "vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("vllm:time_to_first_token_seconds_bucket", "vllm:time_to_first_token_seconds_sum"),
    *("vllm:time_to_first_token_seconds_count", "vllm:kv_cache_usage_perc", "vllm:request_prompt_tokens_bucket"),
    *("vllm:request_generation_tokens_bucket", "vllm:request_success_total", "vllm:request_queue_time_seconds_sum"),
    *("vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum"),
    *("vllm:request_max_num_generation_tokens_sum",),
    # Of older versions of it:
    *("vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds_bucket", "vllm:cache_config_info"),
)
"""What the queries of vLLM's example dashboard (examples/observability/prometheus_grafana/grafana.json) read, each
with the label ``model_name``.
"""
_METRIC = re.compile(r"\b((?:vllm:|actorserve_|http_)\w+)(?:\{([^}]*)\})?")
_BY = re.compile(r"\bby \(([^)]*)\)")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"')
_FUNCTIONS = {"sum", "max", "rate", "increase", "histogram_quantile", "by"}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Mapping[str, set[str]]:
    """The labels of each metric of a server that has served and refused requests, and has restarted a worker."""
    folder = tmp_path_factory.mktemp("grafana")
    keys = folder / "keys.toml"
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    keys.write_text(f'[[key]]\nname = "team"\nsha256 = "{digest}"\nrequests_per_minute = {NUM_REQUESTS}\n')
    keys.chmod(0o600)
    with running(folder / "server", CONFIG.format(keys=keys), "--model", str(default_model_path)) as server:
        statuses = []
        with httpx.Client(base_url=server.url, headers=HEADERS, timeout=120) as client:
            for _ in range(NUM_REQUESTS + 1):
                answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 5, "ignore_eos": True})
                statuses.append(answer.status_code)
            assert statuses == [*[200] * NUM_REQUESTS, 429]
            server.signal("worker-1", signal.SIGKILL)

            def is_complete() -> bool:
                page = client.get("/metrics").text
                return "actorserve_restarts_total{" in page and "vllm:kv_cache_usage_perc{" in page

            wait_until(is_complete, "a restart, and loads of workers")
            page = client.get("/metrics").text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def panels() -> list[dict[str, Any]]:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_every_query_names_what_exists(shown: Mapping[str, set[str]]) -> None:
    """Each metric, each label of a selector, of a sum and of a legend is on the page of a running server."""
    num_queries = 0
    for panel in panels():
        for target in panel["targets"]:
            query, where = target["expr"], f"{panel['title']}: {target['expr']}"
            num_queries += 1
            metrics = _METRIC.findall(query)
            assert metrics, where
            kept = {label for labels in _BY.findall(query) for label in re.split(r"\s*,\s*", labels)}
            for name, matchers in metrics:
                assert name in shown, where
                assert set(dict.fromkeys(_MATCHER.findall(matchers))) <= shown[name], where
                assert kept <= shown[name], where
            legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert legend <= (kept or shown[metrics[0][0]]), where
            rest = _BY.sub(" by ", _METRIC.sub("", query)).replace("[$__rate_interval]", "").replace("[1h]", "")
            assert set(re.findall(r"[a-z_]\w*", rest)) <= _FUNCTIONS, where
            assert query.count("(") == query.count(")"), where
    assert num_queries > 30


def test_the_variable_lists_models(shown: Mapping[str, set[str]]) -> None:
    """The models to choose from are values of a label that exists."""
    variables = json.loads(DASHBOARD.read_text(encoding="utf-8"))["templating"]["list"]
    (query,) = [variable["definition"] for variable in variables if variable["name"] == "model"]
    found = re.fullmatch(r"label_values\((\S+), (\w+)\)", query)
    assert found is not None
    assert found[2] in shown[found[1]]


def test_panels_do_not_overlap() -> None:
    """Each panel has its own place on Grafana's grid of 24 columns, and its own id."""
    places: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert max(x for x, _ in cells) < 24
        assert places.isdisjoint(cells), panel["title"]
        places |= cells
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", OF_VLLM)
def test_vllms_own_dashboard_shows_data(shown: Mapping[str, set[str]], name: str) -> None:
    """What vLLM's example dashboard queries is there, by model."""
    assert "model_name" in shown.get(name, ())

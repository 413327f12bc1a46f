"""The instances' metrics on ``/metrics``: read from their latest load reports when the page is requested."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from actorserve.core.messages import LoadReport
from actorserve.http.service import Service

_LABELS = ("model_name", "engine")


class _Reading(NamedTuple):
    """One metric: a gauge, or a counter since the instance's start."""

    family: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    text: str
    value: Callable[[LoadReport], float]


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily
_READINGS = (
    _Reading(_GAUGE, "vllm:num_requests_running", "Requests in the batch.", lambda load: load.num_running),
    _Reading(
        _GAUGE,
        "vllm:num_requests_waiting",
        "Requests that wait to enter the batch.",
        lambda load: load.num_waiting,
    ),
    _Reading(
        _GAUGE,
        "vllm:kv_cache_usage_perc",
        "Share of the KV cache in use, 0 to 1.",
        lambda load: _share(load.kv_used_bytes, load.kv_total_bytes),
    ),
    _Reading(
        _COUNTER, "vllm:num_preemptions", "Requests that gave up their blocks.", lambda load: load.num_preemptions
    ),
    _Reading(
        _COUNTER,
        "vllm:prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
        lambda load: load.num_tokens_looked_up,
    ),
    _Reading(
        _COUNTER, "vllm:prefix_cache_hits", "Tokens found in the prefix cache.", lambda load: load.num_tokens_found
    ),
    _Reading(
        _GAUGE,
        "actorserve_virtual_usage",
        "Virtual usage divided by the KV cache's size; freeness is computed from it.",
        lambda load: _share(load.virtual_usage_bytes, load.kv_total_bytes),
    ),
    _Reading(
        _GAUGE,
        "actorserve_host_kv_usage",
        "Share of the host's KV pool in use, 0 to 1.",
        lambda load: _share(load.host_used_bytes, load.host_total_bytes),
    ),
    _Reading(_GAUGE, "actorserve_requests_swapped", "Requests whose KV is on the host.", lambda load: load.num_swapped),
    _Reading(
        _COUNTER,
        "actorserve_swap_outs",
        "Requests whose KV was copied to the host.",
        lambda load: load.num_swap_outs,
    ),
    _Reading(
        _COUNTER,
        "actorserve_swapped_bytes",
        "Bytes of KV copied to the host and back.",
        lambda load: load.swapped_bytes,
    ),
    _Reading(
        _COUNTER,
        "actorserve_swap_blocked_seconds",
        "Time that requests due for a step waited for copies.",
        lambda load: load.swap_blocked_s,
    ),
    _Reading(
        _GAUGE,
        "actorserve_requests_migrating",
        "Requests that migrate in or out now.",
        lambda load: load.num_migrating,
    ),
    _Reading(
        _COUNTER,
        "actorserve_migrations",
        "Requests handed over to another worker.",
        lambda load: load.num_migrated,
    ),
    _Reading(
        _COUNTER,
        "actorserve_migrations_failed",
        "Migrations that failed; their requests stayed.",
        lambda load: load.num_migrations_failed,
    ),
    _Reading(
        _COUNTER,
        "actorserve_migrated_bytes",
        "Bytes of KV copied for requests that were handed over.",
        lambda load: load.migrated_bytes,
    ),
    _Reading(
        _COUNTER,
        "actorserve_checkpointed_bytes",
        "Bytes of KV copied into another worker's host memory.",
        lambda load: load.checkpointed_bytes,
    ),
)


class LoadMetrics(Collector):
    """Collects the metrics of all instances."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        model = self._service.model
        name = model.name if model is not None else ""
        loads = sorted(self._service.loads().items())
        for reading in _READINGS:
            family = reading.family(reading.name, reading.text, labels=_LABELS)
            for instance, load in loads:
                family.add_metric((name, instance), reading.value(load))
            yield family
        yield GaugeMetricFamily("actorserve_instances", "Workers that are up.", value=self._service.num_instances)

"""The instances' metrics on ``/metrics``: read from their latest load reports when the page is requested."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from actorserve.core.messages import LoadReport
from actorserve.http.service import Service

_LABELS = ("model_name", "engine")
_GATEWAY = "gateway"


class _Reading(NamedTuple):
    """One metric: a gauge, or a counter since the instance's start. An instance of unknown value is left out."""

    family: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    text: str
    value: Callable[[LoadReport], float | None]


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _kv_usage(load: LoadReport) -> float:
    return _share(load.kv_used_bytes, load.kv_total_bytes)


def _tokens_per_joule(load: LoadReport) -> float | None:
    joules = None if load.power is None else load.power.energy_j
    return load.num_output_tokens / joules if joules else None


_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily
_WAITING = "vllm:num_requests_waiting"
_READINGS = (
    _Reading(_GAUGE, "vllm:num_requests_running", "Requests in the batch.", lambda load: load.num_in_batch),
    _Reading(
        _GAUGE,
        _WAITING,
        "Requests that are not in a batch: at an instance, or (engine gateway) without one.",
        lambda load: load.num_running + load.num_waiting - load.num_in_batch,
    ),
    _Reading(_GAUGE, "vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", _kv_usage),
    _Reading(_GAUGE, "vllm:gpu_cache_usage_perc", "The older name of kv_cache_usage_perc.", _kv_usage),
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
    _Reading(
        _GAUGE,
        "actorserve_power_watts",
        "Power of the GPU; on CPUs what the worker's CPU time takes of the host's CPUs.",
        lambda load: None if load.power is None else load.power.draw_watts,
    ),
    _Reading(
        _COUNTER,
        "actorserve_energy_joules",
        "Energy of the same.",
        lambda load: None if load.power is None else load.power.energy_j,
    ),
    _Reading(
        _COUNTER,
        "actorserve_prompt_energy_joules",
        "The part of this energy that was spent on requests' prompts.",
        lambda load: load.prompt_energy_j,
    ),
    _Reading(
        _COUNTER,
        "actorserve_token_energy_joules",
        "The part of this energy that was spent on requests' tokens after the prompts.",
        lambda load: load.token_energy_j,
    ),
    _Reading(
        _GAUGE,
        "actorserve_tokens_per_joule",
        "Tokens that the instance generated, per joule of this energy.",
        _tokens_per_joule,
    ),
    _Reading(
        _COUNTER,
        "actorserve_output_tokens",
        "Tokens that the instance generated.",
        lambda load: load.num_output_tokens,
    ),
)


class LoadMetrics(Collector):
    """Collects the metrics of all instances that are shown here. ``num_unplaced`` requests of this host have none."""

    def __init__(self, service: Service, num_unplaced: Callable[[], float]) -> None:
        self._service = service
        self._num_unplaced = num_unplaced

    def collect(self) -> Iterable[Metric]:
        model = self._service.model
        name = model.name if model is not None else ""
        loads = sorted(self._service.shown_loads().items())
        for reading in _READINGS:
            family = reading.family(reading.name, reading.text, labels=_LABELS)
            for instance, load in loads:
                value = reading.value(load)
                if value is not None:
                    family.add_metric((name, instance), value)
            if reading.name == _WAITING:
                family.add_metric((name, _GATEWAY), self._num_unplaced())
            yield family
        yield _cache_config(name, loads)
        yield GaugeMetricFamily("actorserve_instances", "Workers that are up.", value=self._service.num_instances)
        yield GaugeMetricFamily(
            "actorserve_coordinator_term",
            "The term of the coordinator that places this gateway's requests; 0 while none does.",
            value=self._service.coordinator_term,
        )


def _cache_config(model: str, loads: Sequence[tuple[str, LoadReport]]) -> Metric:
    """vLLM's gauge that is always 1, and whose labels tell the size of each instance's KV cache in blocks."""
    labels = (*_LABELS, "block_size", "num_gpu_blocks", "num_cpu_blocks")
    family = GaugeMetricFamily("vllm:cache_config_info", "The size of the KV cache.", labels=labels)
    for instance, load in loads:
        num_blocks, num_host_blocks = (
            num_bytes // load.bytes_per_block for num_bytes in (load.kv_total_bytes, load.host_total_bytes)
        )
        values = (model, instance, str(load.tokens_per_block), str(num_blocks), str(num_host_blocks))
        family.add_metric(values, 1.0)
    return family

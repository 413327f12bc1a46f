"""``/metrics``: the names that dashboards for vLLM read, on a registry of our own.

Load comes from the instances' latest reports (``http.metrics.load_metrics``), with one ``engine`` label per instance.
The tokens, latencies and endings that clients see are measured here, and summed over the host's gateways. In these
metrics a request is one choice of an answer, and the ``engine`` is ``gateway``, because a request may change its
worker. Latencies include the wait for a slow client.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, generate_latest

from actorserve.core.messages import FinishReason
from actorserve.http.host_counts import HostCounts
from actorserve.http.metrics.host_metrics import Counter, Histogram, HostMetrics
from actorserve.http.metrics.load_metrics import LoadMetrics
from actorserve.http.service import Service

_ENGINE = "gateway"
_TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_ITL_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_E2E_BUCKETS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_LABELS = ("model_name", "engine")


@dataclass(frozen=True, slots=True)
class _ModelMetrics:
    """The metrics with one model's labels: looking labels up costs more than counting."""

    prompt_tokens: Counter
    prompt_tokens_cached: Counter
    generation_tokens: Counter
    time_to_first_token: Histogram
    inter_token_latency: Histogram
    e2e_latency: Histogram


class Metrics:
    """All metrics of ``/metrics``. ``clock`` gives seconds that never decrease. ``counts`` are shared with the host's
    other gateways.
    """

    def __init__(self, service: Service, clock: Callable[[], float], counts: HostCounts) -> None:
        self._service = service
        self._counts = counts
        self._clock = clock
        self._models: dict[str, _ModelMetrics] = {}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(LoadMetrics(service))
        host = HostMetrics(counts)
        self.registry.register(host)
        self._prompt_tokens = host.counter(
            "vllm:prompt_tokens", "Prompt tokens of requests that were answered.", _LABELS
        )
        self._prompt_tokens_cached = host.counter(
            "vllm:prompt_tokens_cached", "Prompt tokens of these requests that were found in a prefix cache.", _LABELS
        )
        self._generation_tokens = host.counter("vllm:generation_tokens", "Tokens made.", _LABELS)
        self._request_success = host.counter(
            "vllm:request_success", "Requests that ended.", (*_LABELS, "finished_reason")
        )
        self._time_to_first_token = host.histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _LABELS, _TTFT_BUCKETS_S
        )
        self._inter_token_latency = host.histogram(
            "vllm:inter_token_latency_seconds", "Between one token and the next.", _LABELS, _ITL_BUCKETS_S
        )
        self._e2e_latency = host.histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end.", _LABELS, _E2E_BUCKETS_S
        )
        self._unknown_fields = host.counter(
            "actorserve_unknown_fields", "Fields of requests that this server does not know and has ignored."
        ).labels()
        self._answers = host.counter(
            "http_requests",
            "Requests that were answered, also those that were refused.",
            ("handler", "method", "status"),
        )
        for name in service.counters():
            host.counter(f"actorserve_{name}", f"{name.replace('_', ' ')}.")
        self._service_cells = {name: counts.cell((f"actorserve_{name}",)) for name in service.counters()}
        # What this process's predecessor has counted.
        self._counted_before = {name: counts.values[cell] for name, cell in self._service_cells.items()}

    def begin(self, num_prompt_tokens: int) -> "RequestMeter":
        """Begin to measure one request, which has just arrived."""
        model = self._service.model
        name = model.name if model is not None else ""
        if name not in self._models:
            self._models[name] = self._of_model(name)
        return RequestMeter(self._models[name], self._clock, num_prompt_tokens, partial(self._count_end, name))

    def count_unknown_fields(self, num_fields: int) -> None:
        """A request had fields that were ignored."""
        self._unknown_fields.inc(num_fields)

    def count_answer(self, route: str, method: str, status: str) -> None:
        """An answer has begun; the values are those of ``AnswerCounts``."""
        self._answers.labels(route, method, status).inc()

    def render(self) -> bytes:
        """The page, in Prometheus's text format."""
        self._share_service_counts()
        return generate_latest(self.registry)

    def _of_model(self, name: str) -> _ModelMetrics:
        labels = (name, _ENGINE)
        return _ModelMetrics(
            self._prompt_tokens.labels(*labels),
            self._prompt_tokens_cached.labels(*labels),
            self._generation_tokens.labels(*labels),
            self._time_to_first_token.labels(*labels),
            self._inter_token_latency.labels(*labels),
            self._e2e_latency.labels(*labels),
        )

    def _count_end(self, model: str, reason: FinishReason) -> None:
        self._request_success.labels(model, _ENGINE, reason.value).inc()
        self._share_service_counts()

    def _share_service_counts(self) -> None:
        """Write the service's own counts where other gateways find them. They change rarely, and only with requests."""
        for name, count in self._service.counters().items():
            self._counts.values[self._service_cells[name]] = self._counted_before[name] + count


class RequestMeter:
    """One request's times and counts. The first call of ``ended`` or ``released`` ends the request."""

    def __init__(
        self,
        metrics: _ModelMetrics,
        clock: Callable[[], float],
        num_prompt_tokens: int,
        count_end: Callable[[FinishReason], None],
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._num_prompt_tokens = num_prompt_tokens
        self._count_end = count_end
        self._begun_s = clock()
        self._previous_s: float | None = None
        self._ended = False

    def delivered(self, num_tokens: int, num_cached_tokens: int) -> None:
        """``num_tokens`` have just come. ``num_cached_tokens`` counts with the first tokens."""
        now = self._clock()
        metrics = self._metrics
        if self._previous_s is None:
            metrics.time_to_first_token.observe(now - self._begun_s)
            metrics.prompt_tokens.inc(self._num_prompt_tokens)
            metrics.prompt_tokens_cached.inc(num_cached_tokens)
        else:
            metrics.inter_token_latency.observe(now - self._previous_s)
        metrics.generation_tokens.inc(num_tokens)
        self._previous_s = now

    def ended(self, reason: FinishReason) -> None:
        """The request's choice has ended."""
        if self._ended:
            return
        self._ended = True
        self._metrics.e2e_latency.observe(self._clock() - self._begun_s)
        self._count_end(reason)

    def released(self) -> None:
        """The client no longer waits for the request. If it has not ended, it counts as aborted."""
        self.ended(FinishReason.ABORT)

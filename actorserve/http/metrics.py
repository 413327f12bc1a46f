"""``/metrics``: the names that dashboards for vLLM read, on a registry of our own.

Load comes from the instances' latest reports (``http.load_metrics``), one ``engine`` each. What clients see (tokens,
latencies, endings) is measured here, where a request is one choice of an answer; its ``engine`` is ``gateway``, for a
request may change its worker. Latencies include the wait for a client that reads slowly.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from actorserve.core.messages import FinishReason
from actorserve.http.load_metrics import LoadMetrics
from actorserve.http.service import Service

_ENGINE = "gateway"
_TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_ITL_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_E2E_BUCKETS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_LABELS = ("model_name", "engine")


class Metrics:
    """All that ``/metrics`` shows. ``clock`` gives seconds that never go back."""

    def __init__(self, service: Service, clock: Callable[[], float]) -> None:
        self._service = service
        self._clock = clock
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(LoadMetrics(service))
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that were answered.")
        self.prompt_tokens_cached = self._counter(
            "vllm:prompt_tokens_cached", "Of those, the tokens that were found in a prefix cache."
        )
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens made.")
        self.request_success = Counter(
            "vllm:request_success", "Requests that ended.", (*_LABELS, "finished_reason"), registry=self.registry
        )
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _TTFT_BUCKETS_S
        )
        self.inter_token_latency = self._histogram(
            "vllm:inter_token_latency_seconds", "Between one token and the next.", _ITL_BUCKETS_S
        )
        self.e2e_latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end.", _E2E_BUCKETS_S
        )

    def begin(self, num_prompt_tokens: int) -> "RequestMeter":
        """Begin to measure one request, which has just arrived."""
        model = self._service.model
        return RequestMeter(self, self._clock, model.name if model is not None else "", num_prompt_tokens)

    def render(self) -> bytes:
        """The page, in Prometheus's text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _LABELS, registry=self.registry, buckets=buckets)


class RequestMeter:
    """One request's times and counts. Ends once, with the first of ``finished`` and ``released``."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float], model: str, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._clock = clock
        self._labels = (model, _ENGINE)
        self._num_prompt_tokens = num_prompt_tokens
        self._begun_s = clock()
        self._previous_s: float | None = None
        self._ended = False

    def produced(self, num_tokens: int, num_cached_tokens: int) -> None:
        """``num_tokens`` came together just now; the first of them, after a prompt of which so much was cached."""
        now = self._clock()
        metrics = self._metrics
        if self._previous_s is None:
            metrics.time_to_first_token.labels(*self._labels).observe(now - self._begun_s)
            metrics.prompt_tokens.labels(*self._labels).inc(self._num_prompt_tokens)
            metrics.prompt_tokens_cached.labels(*self._labels).inc(num_cached_tokens)
        else:
            metrics.inter_token_latency.labels(*self._labels).observe(now - self._previous_s)
        metrics.generation_tokens.labels(*self._labels).inc(num_tokens)
        self._previous_s = now

    def finished(self, reason: FinishReason) -> None:
        """The request ended by itself."""
        if self._ended:
            return
        self._ended = True
        self._metrics.e2e_latency.labels(*self._labels).observe(self._clock() - self._begun_s)
        self._metrics.request_success.labels(*self._labels, reason.value).inc()

    def released(self) -> None:
        """Nobody waits for it any more; without an end of its own, that is an abort."""
        self.finished(FinishReason.ABORT)

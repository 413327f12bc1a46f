"""The times and counts of one request, which its client's log line and the metrics tell."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from actorserve.core.effects import Deliver
from actorserve.core.messages import Energy, FinishReason, RequestSpec
from actorserve.http.metrics.host_metrics import Counter, Histogram, HostMetrics
from actorserve.http.metrics.names import (
    INTER_TOKEN_LATENCY,
    KEY_GENERATION_TOKENS,
    KEY_PROMPT_TOKENS,
    TIME_TO_FIRST_TOKEN,
)

_ENGINE: Final = "gateway"
_LABELS: Final = ("model_name", "engine")
_TTFT_BUCKETS_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_ITL_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_BUCKETS_S: Final = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_PART_BUCKETS_S: Final = (0.001, 0.01, 0.05, 0.1, *_REQUEST_BUCKETS_S)
_TOKEN_BUCKETS: Final = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))


@dataclass(frozen=True, slots=True)
class _ModelMetrics:
    """The metrics with one model's labels: looking labels up costs more than counting."""

    prompt_tokens: Counter
    prompt_tokens_cached: Counter
    generation_tokens: Counter
    time_to_first_token: Histogram
    inter_token_latency: Histogram
    time_per_output_token: Histogram
    e2e_latency: Histogram
    queue_time: Histogram
    prefill_time: Histogram
    decode_time: Histogram
    inference_time: Histogram
    num_prompt_tokens: Histogram
    num_generation_tokens: Histogram
    max_num_generation_tokens: Histogram


@dataclass(frozen=True, slots=True)
class _KeyMetrics:
    """The metrics of one API key."""

    prompt_tokens: Counter
    generation_tokens: Counter


class RequestMetrics:
    """The families that requests are counted in, under vLLM's names, and the use of each API key."""

    def __init__(self, host: HostMetrics, clock: Callable[[], float]) -> None:
        """``clock`` gives seconds that never decrease."""
        self._clock = clock
        self._models: dict[str, _ModelMetrics] = {}
        self._keys: dict[str, _KeyMetrics] = {}
        counter, histogram = host.counter, host.histogram
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that were answered.", _LABELS)
        self._prompt_tokens_cached = counter(
            "vllm:prompt_tokens_cached", "Prompt tokens of these requests that were found in a prefix cache.", _LABELS
        )
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens made.", _LABELS)
        self._success = counter("vllm:request_success", "Requests that ended.", (*_LABELS, "finished_reason"))
        self._time_to_first_token = histogram(
            TIME_TO_FIRST_TOKEN, "From arrival to the first token.", _LABELS, _TTFT_BUCKETS_S
        )
        self._inter_token_latency = histogram(
            INTER_TOKEN_LATENCY,
            "Between one token and the next.",
            _LABELS,
            _ITL_BUCKETS_S,
            also="vllm:time_per_output_token_seconds",
        )
        self._time_per_output_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "The mean time between a request's tokens.",
            _LABELS,
            _ITL_BUCKETS_S,
        )
        self._e2e_latency = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end.", _LABELS, _REQUEST_BUCKETS_S
        )
        self._queue_time = histogram(
            "vllm:request_queue_time_seconds", "From arrival to the first iteration.", _LABELS, _PART_BUCKETS_S
        )
        self._prefill_time = histogram(
            "vllm:request_prefill_time_seconds",
            "From the first iteration to the first token.",
            _LABELS,
            _PART_BUCKETS_S,
        )
        self._decode_time = histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", _LABELS, _PART_BUCKETS_S
        )
        self._inference_time = histogram(
            "vllm:request_inference_time_seconds",
            "From the first iteration to the last token.",
            _LABELS,
            _PART_BUCKETS_S,
        )
        self._num_prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", _LABELS, _TOKEN_BUCKETS
        )
        self._num_generation_tokens = histogram(
            "vllm:request_generation_tokens", "Tokens made for a request.", _LABELS, _TOKEN_BUCKETS
        )
        self._max_num_generation_tokens = histogram(
            "vllm:request_max_num_generation_tokens",
            "Tokens made for the longest choice of an answer.",
            _LABELS,
            _TOKEN_BUCKETS,
        )
        self._key_prompt_tokens = counter(KEY_PROMPT_TOKENS, "Prompt tokens of the requests of an API key.", ("key",))
        self._key_generation_tokens = counter(
            KEY_GENERATION_TOKENS, "Tokens made for the requests of an API key.", ("key",)
        )

    def begin(self, model: str, spec: RequestSpec) -> "RequestMeter":
        """Begin to measure a request for ``model``, which has just arrived."""
        metrics = self._models.get(model)
        if metrics is None:
            metrics = self._models[model] = self._of_model(model)
        key = self._of_key(spec.client) if spec.client else None
        return RequestMeter(self, model, metrics, key, self._clock, len(spec.prompt_token_ids))

    def count_end(self, model: str, reason: FinishReason) -> None:
        self._success.labels(model, _ENGINE, reason.value).inc()

    def _of_model(self, model: str) -> _ModelMetrics:
        labels = (model, _ENGINE)
        return _ModelMetrics(
            self._prompt_tokens.labels(*labels),
            self._prompt_tokens_cached.labels(*labels),
            self._generation_tokens.labels(*labels),
            self._time_to_first_token.labels(*labels),
            self._inter_token_latency.labels(*labels),
            self._time_per_output_token.labels(*labels),
            self._e2e_latency.labels(*labels),
            self._queue_time.labels(*labels),
            self._prefill_time.labels(*labels),
            self._decode_time.labels(*labels),
            self._inference_time.labels(*labels),
            self._num_prompt_tokens.labels(*labels),
            self._num_generation_tokens.labels(*labels),
            self._max_num_generation_tokens.labels(*labels),
        )

    def _of_key(self, key: str) -> _KeyMetrics:
        metrics = self._keys.get(key)
        if metrics is None:
            metrics = self._keys[key] = _KeyMetrics(
                self._key_prompt_tokens.labels(key), self._key_generation_tokens.labels(key)
            )
        return metrics


class RequestMeter:
    """One request's times and counts. The first call of ``ended`` or ``released`` ends the request.

    It began at ``begun_s`` on the clock. ``queued_s`` passed before its first iteration, ``prefill_s`` from there to
    its first token, and ``decode_s`` from there to its last one; all are 0 without a token. ``ttft_s`` is None without
    a token. ``workers`` made its tokens.
    """

    def __init__(
        self,
        families: RequestMetrics,
        model: str,
        metrics: _ModelMetrics,
        key: _KeyMetrics | None,
        clock: Callable[[], float],
        num_prompt_tokens: int,
    ) -> None:
        self.model: Final = model
        self.num_prompt_tokens: Final = num_prompt_tokens
        self.num_cached_tokens = 0
        self.num_tokens = 0
        self.workers: list[str] = []
        self.queued_s = 0.0
        self.ttft_s: float | None = None
        self.e2e_s = 0.0
        self.reason: FinishReason | None = None
        self.energy: Energy | None = None
        self._families = families
        self._metrics = metrics
        self._key = key
        self._clock = clock
        self.begun_s: Final = clock()
        self._previous_s = self.begun_s
        if key is not None:
            key.prompt_tokens.inc(num_prompt_tokens)

    @property
    def prefill_s(self) -> float:
        return 0.0 if self.ttft_s is None else self.ttft_s - self.queued_s

    @property
    def decode_s(self) -> float:
        return 0.0 if self.ttft_s is None else self._previous_s - self.begun_s - self.ttft_s

    def delivered(self, effect: Deliver) -> None:
        """Tokens have just come."""
        now, metrics, num_tokens = self._clock(), self._metrics, len(effect.token_ids)
        if self.ttft_s is None:
            self.ttft_s = now - self.begun_s
            self.queued_s = min(effect.queued_s, self.ttft_s)
            self.num_cached_tokens = effect.num_cached_tokens
            metrics.time_to_first_token.observe(self.ttft_s)
            metrics.prompt_tokens.inc(self.num_prompt_tokens)
            metrics.prompt_tokens_cached.inc(effect.num_cached_tokens)
        else:
            metrics.inter_token_latency.observe(now - self._previous_s)
        if effect.worker and (not self.workers or self.workers[-1] != effect.worker):
            self.workers.append(effect.worker)
        metrics.generation_tokens.inc(num_tokens)
        if self._key is not None:
            self._key.generation_tokens.inc(num_tokens)
        self.num_tokens += num_tokens
        self._previous_s = now

    def ended(self, reason: FinishReason, energy: Energy | None = None) -> None:
        """The request's choice has ended. ``energy`` is what workers spent on it; None: not known."""
        if self.reason is not None:
            return
        self.reason = reason
        self.energy = energy
        self.e2e_s = self._clock() - self.begun_s
        metrics = self._metrics
        metrics.e2e_latency.observe(self.e2e_s)
        self._families.count_end(self.model, reason)
        if self.ttft_s is None:
            return
        metrics.queue_time.observe(self.queued_s)
        metrics.prefill_time.observe(self.prefill_s)
        metrics.decode_time.observe(self.decode_s)
        metrics.inference_time.observe(self.prefill_s + self.decode_s)
        metrics.num_prompt_tokens.observe(self.num_prompt_tokens)
        metrics.num_generation_tokens.observe(self.num_tokens)
        if self.num_tokens > 1:
            metrics.time_per_output_token.observe(self.decode_s / (self.num_tokens - 1))

    def released(self) -> None:
        """The client no longer waits for the request. If it has not ended, it counts as aborted."""
        self.ended(FinishReason.ABORT)

    def was_longest(self) -> None:
        """No choice of its answer got more tokens."""
        self._metrics.max_num_generation_tokens.observe(self.num_tokens)

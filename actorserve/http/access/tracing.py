"""OpenTelemetry spans of requests: a span for the request, and child spans for its queue, prefill and decode.

Spans are made from the request's record when it has ended, with the times that the record tells. So a request that is
served costs nothing more. A client's trace goes on in them (the header ``traceparent`` of W3C), and its decision
whether to sample holds. The packages of the extra ``otel`` are imported only if spans are wanted.
"""

import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from starlette.types import Scope

from actorserve.errors import SettingsError
from actorserve.http.access.request_id import request_id_of
from actorserve.http.record import Measured, Record

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

_SERVICE: Final = "actorserve"
_TIMEOUT_S: Final = 5.0
_NS: Final = 1e9
_HEADERS: Final = ("traceparent", "tracestate")


class Tracing:
    """Makes spans with ``provider``. ``now_ns`` is the time that spans are dated by, in nanoseconds since 1970."""

    def __init__(self, provider: "TracerProvider", now_ns: Callable[[], int] = time.time_ns) -> None:
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer(_SERVICE)
        self._now_ns = now_ns
        self._read_parent = TraceContextTextMapPropagator().extract
        self._within = set_span_in_context
        self._kind = SpanKind.SERVER
        self._error = StatusCode.ERROR

    def ended(self, scope: Scope, route: str, record: Record, began_s: float, ended_s: float) -> None:
        """A request has ended just now. It began at ``began_s`` on the clock of its record."""
        now_ns = self._now_ns()

        def at_ns(moment_s: float) -> int:
            return now_ns - round((ended_s - moment_s) * _NS)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        carrier = {name: headers[name] for name in _HEADERS if name in headers}
        span = self._tracer.start_span(
            f"{scope['method']} {route}",
            self._read_parent(carrier),
            self._kind,
            attributes=_attributes(scope, route, record),
            start_time=at_ns(began_s),
        )
        if record.status is not None and record.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            span.set_status(self._error, record.error)
        for index, choice in enumerate(record.choices):
            self._add_parts(choice, index, self._within(span), at_ns)
        span.end(now_ns)

    def close(self) -> None:
        """Send what is left, but do not wait long for a collector that does not answer."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(_TIMEOUT_S)

    def _add_parts(self, choice: Measured, index: int, parent: "Context", at_ns: Callable[[float], int]) -> None:
        """The child spans of one choice, one after the other. Without a token there is only the queue, whose end is not
        known, so there are none.
        """
        if choice.ttft_s is None:
            return
        moment_s = choice.begun_s
        for name, duration_s in (
            ("queue", choice.queued_s),
            ("prefill", choice.prefill_s),
            ("decode", choice.decode_s),
        ):
            values: dict[str, Any] = {"actorserve.choice": index, "actorserve.workers": list(choice.workers)}
            part = self._tracer.start_span(name, parent, attributes=values, start_time=at_ns(moment_s))
            moment_s += duration_s
            part.end(at_ns(moment_s))


def open_tracing(endpoint: str | None, process_name: str) -> Tracing | None:
    """Spans that are sent to a collector, by OTLP over HTTP in batches, from a thread. None without an ``endpoint``.

    Raises: SettingsError, if the packages are missing.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise SettingsError("log.trace_endpoint needs further packages: pip install 'actorserve[otel]'") from None
    resource = Resource.create({"service.name": _SERVICE, "service.instance.id": process_name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=_TIMEOUT_S)))
    return Tracing(provider)


def _attributes(scope: Scope, route: str, record: Record) -> dict[str, Any]:
    """The names are those of OpenTelemetry's conventions, where they have one."""
    choices = record.choices
    values: dict[str, Any] = {
        "http.request.method": scope["method"],
        "http.route": route,
        "http.response.status_code": record.status,
        "actorserve.request_id": request_id_of(scope),
        "actorserve.key": record.key,
        "error.type": record.error_code,
    }
    if choices:
        reasons = dict.fromkeys(choice.reason.value for choice in choices if choice.reason is not None)
        first_tokens_s = [choice.ttft_s for choice in choices if choice.ttft_s is not None]
        values |= {
            "gen_ai.request.model": next(choice.model for choice in choices),
            "gen_ai.usage.input_tokens": sum(choice.num_prompt_tokens for choice in choices),
            "gen_ai.usage.output_tokens": sum(choice.num_tokens for choice in choices),
            "gen_ai.response.finish_reasons": list(reasons),
            "gen_ai.latency.time_to_first_token": min(first_tokens_s, default=None),
        }
    return {name: value for name, value in values.items() if value is not None}

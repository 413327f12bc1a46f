"""Spans of requests: their times and attributes, a client's own trace, and a server without the packages."""

import subprocess
import sys
from dataclasses import replace

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from actorserve.core.messages import FinishReason
from actorserve.errors import SettingsError
from actorserve.http.access.tracing import Tracing, open_tracing
from actorserve.http.app import create_app
from actorserve.settings import HttpSettings
from tests.http.fakes import DESCRIPTION, MODEL, TOKENIZER, ScriptedService, delivered, end, refuses, says
from tests.sources import ROOT

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
NOW_NS = 10**18


class Clock:
    """Advances by one second at every reading."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


async def spans_of(service: ScriptedService, path: str = "/v1/completions", **headers: str) -> list[ReadableSpan]:
    """The spans of one request, in the order in which they ended."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider, lambda: NOW_NS)
    app = create_app(service, TOKENIZER, None, DESCRIPTION, HttpSettings(), clock=Clock(), tracing=tracing)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        if path == "/health":
            await client.get(path)
        else:
            await client.post(path, json={"prompt": "xyz"})
    return list(exporter.get_finished_spans())


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


async def test_a_request_has_a_span_with_its_parts() -> None:
    """Queue, prefill and decode follow each other within the request's span, and last as the record says."""
    first = replace(delivered("ab"), queued_s=0.25, worker="worker-1")
    service = ScriptedService(lambda _: [first, delivered("cd"), end(FinishReason.STOP)])
    queue, prefill, decode, request = await spans_of(service, **{"x-request-id": "mine"})
    assert [span.name for span in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    assert [seconds(span) for span in (queue, prefill, decode)] == [0.25, 0.75, 1.0]
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
    assert request.name == "POST /v1/completions"
    assert request.context is not None
    for part in (queue, prefill, decode):
        assert part.parent is not None
        assert part.parent.span_id == request.context.span_id
        assert dict(part.attributes or {}) == {"actorserve.choice": 0, "actorserve.workers": ("worker-1",)}
    assert queue.start_time is not None
    assert decode.end_time is not None
    assert request.start_time is not None
    assert request.start_time < queue.start_time
    assert decode.end_time < NOW_NS == request.end_time
    attributes = dict(request.attributes or {})
    assert attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "actorserve.request_id": "mine",
        "gen_ai.request.model": MODEL,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.latency.time_to_first_token": 1.0,
    }


async def test_a_clients_trace_goes_on() -> None:
    """The request's span belongs to the trace of ``traceparent``, unless that is malformed or not sampled."""
    request = (await spans_of(says("x"), traceparent=f"00-{TRACE}-{PARENT}-01"))[-1]
    assert request.context is not None
    assert request.parent is not None
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    assert await spans_of(says("x"), traceparent=f"00-{TRACE}-{PARENT}-00") == []
    assert (await spans_of(says("x"), traceparent="00-nonsense"))[-1].parent is None


async def test_a_failed_request_has_a_span_without_parts() -> None:
    """Without a token there are no parts; an error of the server marks the span."""
    from actorserve.core.messages import RefusalReason

    (span,) = await spans_of(refuses(RefusalReason.NO_INSTANCE))
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "no_instance"


async def test_probes_have_no_spans() -> None:
    """What programs ask every few seconds is no trace."""
    assert await spans_of(says("x"), "/health") == []


def test_without_an_endpoint_nothing_is_imported() -> None:
    """A server without the extra starts, and one that wants spans says what is missing."""
    hide = "import sys; sys.modules['opentelemetry'] = None; "
    use = "import actorserve.http.app; from actorserve.http.access.tracing import open_tracing; "
    for endpoint, expected in (("None", "None"), ("'http://x'", "pip install 'actorserve[otel]'")):
        script = f"{hide}{use}\ntry:\n    print(open_tracing({endpoint}, 'g'))\nexcept Exception as e:\n    print(e)"
        done = subprocess.run(
            [sys.executable, "-P", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert expected in done.stdout


def test_a_collector_that_is_away_holds_nothing_up() -> None:
    """Spans that cannot be sent are dropped at the end."""
    tracing = open_tracing("http://127.0.0.1:9/v1/traces", "gateway-0")
    assert tracing is not None
    tracing.close()


def test_the_endpoint_must_be_a_url() -> None:
    """A host and port alone are refused, with the setting's name."""
    from actorserve.settings import LogSettings

    with pytest.raises((SettingsError, ValueError), match="trace_endpoint"):
        LogSettings(trace_endpoint="localhost:4318")

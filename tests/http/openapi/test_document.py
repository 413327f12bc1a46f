"""The OpenAPI document is true: nothing is missing in it, and its examples are answered as it says."""

import json
from collections.abc import Iterator
from typing import Any, get_args

import httpx
import pytest
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from actorserve.core.messages import FinishReason
from actorserve.http.openapi.answers import ChatCompletionChunk, Completion
from actorserve.http.openapi.document import make_document, methods_of, open_path
from actorserve.http.openapi.operation import Example, Operation
from actorserve.http.openapi.operations import OPERATIONS
from actorserve.http.requests.strict import RequestContext, StrictFields
from actorserve.settings import HttpSettings
from tests.http.agents import agent_app, agent_service, call, thinks_and_calls
from tests.http.fakes import MODEL, ScriptedService, app_for, client_for, delivered, end, serving

REQUESTS = {model.__name__: model for operation in OPERATIONS for model in operation.requests}
HELLO = [{"role": "user", "content": "hello"}]
EXAMPLES = [
    pytest.param(operation, example, id=f"{operation.method} {operation.path} {name}")
    for operation in OPERATIONS
    for name, example in operation.examples.items()
]


def routes_of(app: ASGIApp) -> list[Route]:
    """All routes of an app's API, inside its middlewares."""
    while not isinstance(app, Starlette):
        app = vars(app)["_app"]
    return [route for route in app.routes if isinstance(route, Route) and route.include_in_schema]


def answering() -> ScriptedService:
    """A service whose answers have text and, where wanted, log-probabilities. It has room for the prompts of tools."""
    return agent_service(
        lambda spec: [delivered("he", -0.5 if spec.sampling.top_logprobs >= 0 else None), end(FinishReason.LENGTH)]
    )


async def document() -> dict[str, Any]:
    async with client_for(answering()) as client:
        answer = await client.get("/openapi.json")
    shown: dict[str, Any] = answer.json()
    return shown


def objects_in(value: object) -> Iterator[dict[str, Any]]:
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects_in(item)
    if isinstance(value, dict):
        yield value


def events_of(text: str, kind: type[BaseModel]) -> list[BaseModel]:
    """The events of a stream, each of the form ``kind``."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if kind in (ChatCompletionChunk, Completion):
        assert events.pop() == "[DONE]"
    return [kind.model_validate_json(event) for event in events]


def test_every_route_is_described() -> None:
    """Every method of every route has an operation, and no operation is left without its route."""
    routes = {(method, open_path(route)) for route in routes_of(app_for(answering())) for method in methods_of(route)}
    described_routes = {(operation.method, operation.path) for operation in OPERATIONS}
    assert routes - described_routes == set(), "describe them in actorserve/http/openapi/operations.py"
    assert described_routes - routes == set()


def test_a_new_route_appears_by_itself() -> None:
    """A route without an operation is in the document, with the errors that every route has."""
    shown = make_document([Route("/v1/new/{name:path}", lambda _: None)], (), "1", allows_unknown_fields=True)
    assert set(shown["paths"]["/v1/new/{name}"]["get"]["responses"]) == {"200", "401", "500"}


def models_in(kind: Any) -> Iterator[type[StrictFields]]:
    """The models of a request's parts, at any depth."""
    if isinstance(kind, type) and issubclass(kind, StrictFields):
        yield kind
        for info in kind.model_fields.values():
            for part in (info.annotation, *(getattr(item, "json_schema_input_type", None) for item in info.metadata)):
                yield from models_in(part)
    for part in get_args(kind):
        yield from models_in(part)


@pytest.mark.parametrize("name", REQUESTS)
def test_every_field_is_described(name: str) -> None:
    """A field that our own code checks tells the type that clients write."""
    unknown = [
        f"{model.__name__}.{field}"
        for model in dict.fromkeys(models_in(REQUESTS[name]))
        for field, info in model.model_fields.items()
        if any(getattr(item, "json_schema_input_type", None) is Any for item in info.metadata)
    ]
    assert unknown == [], "use parsed_by in place of PlainValidator"


async def test_every_field_is_shown() -> None:
    """A field of a request's model is in the document, by itself."""
    schemas = (await document())["components"]["schemas"]
    for name, model in REQUESTS.items():
        assert set(schemas[name]["properties"]) == set(model.model_fields)


@pytest.mark.parametrize("name", REQUESTS)
def test_null_means_the_default(name: str) -> None:
    """As the document says, every field that may be missing may be null."""
    model = REQUESTS[name]
    required = {field for field, info in model.model_fields.items() if info.is_required()}
    examples = [each for operation in OPERATIONS if model in operation.requests for each in operation.examples.values()]
    first = next(example for example in examples if required <= set(example.body or {}))
    wrong = []
    for field, info in model.model_fields.items():
        if not info.is_required():
            try:
                model.model_validate({**(first.body or {}), field: None}, context=RequestContext(HttpSettings()))
            except ValidationError:
                wrong.append(field)
    assert wrong == []


@pytest.mark.parametrize(("operation", "example"), EXAMPLES)
async def test_examples_are_answered_as_described(operation: Operation, example: Example) -> None:
    """An example gets the status that it names, and an answer of the described form, whole or as a stream."""
    path = operation.path.format_map({"model": MODEL, **example.path})
    async with serving(app_for(answering())) as (url, _), httpx.AsyncClient() as client:
        answer = await client.request(operation.method, url + path, json=example.body)
    assert answer.status_code == example.status, answer.text
    shown = (await document())["paths"][operation.path][operation.method.lower()]["responses"][str(example.status)]
    content_type = answer.headers["content-type"].partition(";")[0]
    assert content_type in shown["content"]
    if content_type == "text/event-stream":
        assert operation.event is not None
        events_of(answer.text, operation.event)
    elif content_type == "application/json":
        (schema,) = [each["schema"] for kind, each in shown["content"].items() if kind == content_type]
        model = operation.answers.get(example.status)
        if model is None:
            assert schema == {"$ref": f"#/components/schemas/{operation.error.__name__}"}
            operation.error.model_validate_json(answer.content)
        else:
            assert schema == {"$ref": f"#/components/schemas/{model.__name__}"}
            model.model_validate_json(answer.content)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "question", "tool"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, {"type": "function", "function": {"name": "weather"}}),
        ("/v1/responses", {"input": "hello"}, {"type": "function", "name": "weather"}),
        (
            "/v1/messages",
            {"model": MODEL, "messages": HELLO, "max_tokens": 99},
            {"name": "weather", "input_schema": {"type": "object"}},
        ),
    ],
)
async def test_thoughts_and_calls_have_the_described_form(
    path: str, question: dict[str, Any], tool: dict[str, Any], is_streamed: bool
) -> None:
    """An answer of thoughts and a call has the form that the document describes, whole or as a stream."""
    operation = next(each for each in OPERATIONS if each.path == path)
    service = thinks_and_calls("<think>hm</think>" + call("weather", city="Oslo"))
    transport = httpx.ASGITransport(agent_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(path, json={**question, "tools": [tool], "stream": is_streamed})
    assert '"weather"' in answer.text
    assert '"reasoning' in answer.text or '"thinking"' in answer.text
    if is_streamed:
        assert operation.event is not None
        events_of(answer.text, operation.event)
    else:
        model = operation.answers[200]
        assert model is not None
        model.model_validate_json(answer.content)


def test_every_operation_has_an_example() -> None:
    """A body has examples, one of them streamed if there are streams, and they are in the document's form."""
    for operation in OPERATIONS:
        assert operation.examples
        bodies = [dict(example.body or {}) for example in operation.examples.values()]
        assert all(bodies) == bool(operation.requests)
        assert any(body.get("stream") for body in bodies) == (operation.event is not None)


async def test_references_resolve() -> None:
    """Every reference in the document names a schema that it has, and every number in it is JSON."""
    shown = await document()
    schemas = shown["components"]["schemas"]
    used = {each["$ref"].removeprefix("#/components/schemas/") for each in objects_in(shown) if "$ref" in each}
    assert used <= set(schemas)
    assert json.dumps(shown, allow_nan=False)

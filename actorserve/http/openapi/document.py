"""Writes the OpenAPI document: an operation for each method of each route, and the schemas of bodies."""

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute, Route

from actorserve.http.answers.answer_format import Json
from actorserve.http.openapi.answers import Error
from actorserve.http.openapi.operation import Operation

OPENAPI_VERSION = "3.2.0"  # the first version that can describe a stream of events
_EVERY_ROUTE_FAILS_WITH = (401, 500)
_OVERLOADED = 529  # of Anthropic's API only
_CONVERTOR = re.compile(r":\w+}")
_REF = "#/components/schemas/"


def open_path(route: Route) -> str:
    """The route's path as OpenAPI writes it: without the types of its parameters."""
    return _CONVERTOR.sub("}", route.path)


def methods_of(route: Route) -> list[str]:
    """The methods that have an operation. HEAD is GET without a body."""
    return sorted((route.methods or set()) - {"HEAD"})


def make_document(
    routes: Iterable[BaseRoute], operations: Sequence[Operation], version: str, *, allows_unknown_fields: bool
) -> Json:
    """The document of these routes. With ``allows_unknown_fields`` requests may have fields that it does not show.

    A route without an operation is listed, with what holds for every route. Routes that are not
    ``include_in_schema`` are pages for people, and are left out.
    """
    known = {(operation.method, operation.path): operation for operation in operations}
    requests = [model for each in operations for model in each.requests]
    answers = [model for each in operations for model in (*each.answers.values(), each.event, each.error)]
    others = [model for model in answers if model is not None]
    names, schemas = _schemas(requests, [Error, *others], allows_unknown_fields=allows_unknown_fields)
    paths: dict[str, Json] = {}
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            path = open_path(route)
            for method in methods_of(route):
                operation = known.get((method, path), Operation(method, path, "", {200: None}))
                paths.setdefault(path, {})[method.lower()] = _operation(operation, names)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "actorserve",
            "version": version,
            "description": "OpenAI's API for one served model. A field that is null has its default.",
        },
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "needed on every route except /health, /ready and /ping if the operator has set "
                    "API keys; it may also come in the header x-api-key",
                }
            },
        },
    }


Names = dict[type[Any], Json]
"""Model -> the reference to its schema."""


def _schemas(
    requests: Sequence[type[BaseModel]], answers: Sequence[type[BaseModel]], *, allows_unknown_fields: bool
) -> tuple[Names, Json]:
    inputs, input_schemas = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(requests)], ref_template=_REF + "{model}"
    )
    outputs, output_schemas = models_json_schema(
        [(model, "serialization") for model in dict.fromkeys(answers)], ref_template=_REF + "{model}"
    )
    for schema in input_schemas.get("$defs", {}).values():
        _allow_nulls(schema)
        if allows_unknown_fields:
            schema.pop("additionalProperties", None)
    names = {model: {"$ref": ref["$ref"]} for (model, _), ref in (inputs | outputs).items()}
    return names, {**output_schemas.get("$defs", {}), **input_schemas.get("$defs", {})}


def _allow_nulls(schema: Json) -> None:
    """Let each field that may be missing be null as well, which means its default."""
    for name, value in schema.get("properties", {}).items():
        allows_null = {"type": "null"} in value.get("anyOf", ()) or None in value.get("enum", ())
        if name not in schema.get("required", ()) and not allows_null:
            kept = {key: value.pop(key) for key in ("title", "default", "description") if key in value}
            schema["properties"][name] = {"anyOf": [value, {"type": "null"}], **kept} if value else kept


def _operation(operation: Operation, names: Names) -> Json:
    written: Json = {
        "summary": operation.summary,
        "operationId": _operation_id(operation),
        "responses": {str(status): body for status, body in sorted(_responses(operation, names).items())},
    }
    parameters = re.findall(r"{(\w+)}", operation.path)
    if parameters:
        written["parameters"] = [
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": {"type": "string"},
                "examples": {
                    title: {"value": example.path[name]}
                    for title, example in operation.examples.items()
                    if name in example.path
                },
            }
            for name in parameters
        ]
    if operation.requests:
        schemas = [names[model] for model in operation.requests]
        written["requestBody"] = {
            "required": True,
            "content": {
                "application/json": {
                    "schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas},
                    "examples": {title: {"value": example.body} for title, example in operation.examples.items()},
                }
            },
        }
    return written


def _operation_id(operation: Operation) -> str:
    return re.sub(r"\W+", "_", f"{operation.method.lower()}{operation.path}").strip("_")


def _responses(operation: Operation, names: Names) -> dict[int, Json]:
    failed = dict.fromkeys((*_EVERY_ROUTE_FAILS_WITH, *operation.errors), operation.error)
    responses: dict[int, Json] = {}
    for status, model in {**failed, **operation.answers}.items():
        content: Json = {"text/plain": {"schema": {"type": "string"}}}
        if model is not None:
            content = {"application/json": {"schema": names[model]}}
        if status == HTTPStatus.OK and operation.event is not None:
            content["text/event-stream"] = _stream({"anyOf": [names[operation.event], names[Error]]})
        responses[status] = {
            "description": "Overloaded" if status == _OVERLOADED else HTTPStatus(status).phrase,
            "headers": _headers(status),
            "content": content,
        }
    return responses


def _headers(status: int) -> Json:
    text: Json = {"schema": {"type": "string"}}
    headers: Json = {"x-request-id": {"description": "the id that the client sent, or a new one", **text}}
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE, _OVERLOADED):
        headers["retry-after"] = {"description": "seconds after which to try again", **text}
    return headers


def _stream(event: Json) -> Json:
    """A stream of events, each with JSON as its data: a chunk, or the error that ends the answer."""
    chunk = {"type": "string", "contentMediaType": "application/json", "contentSchema": event}
    data = {"anyOf": [{"const": "[DONE]", "description": "the data of the last event"}, chunk]}
    return {"itemSchema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}

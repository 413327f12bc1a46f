"""Parses and validates bodies. A wrong body gives an error that names the field and repeats no long input."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from actorserve.errors import InvalidRequestError
from actorserve.http.requests.strict import RequestContext, StrictFields, wrong
from actorserve.settings import HttpSettings

_MAX_PROBLEMS = 10
_MAX_NAME_CHARS = 64
_LARGE_BODY_BYTES = 64 * 1024
"""Bodies of this size or more are parsed in another thread, because parsing would delay all streams."""
_MAX_STRINGS = 200_000
_MAX_STRUCTURE = 100_000
_MAX_VALUES = 1_000_000
"""Token ids are most of these values: a prompt may have very many."""

RequestT = TypeVar("RequestT", bound=StrictFields)


class RequestParser:
    """Turns bodies into validated requests. ``count_unknown_fields`` gets the number of fields that one ignored."""

    def __init__(self, settings: HttpSettings, count_unknown_fields: Callable[[int], None]) -> None:
        self._settings = settings
        self._count_unknown_fields = count_unknown_fields

    async def parse(self, kind_of: Callable[[dict[str, Any]], type[RequestT]], body: bytes) -> RequestT:
        """Validate a body of JSON text. ``kind_of`` tells from the parsed JSON what kind of request it is.

        Raises: InvalidRequestError that names at most ten problems and repeats no long input.
        """
        if len(body) < _LARGE_BODY_BYTES:
            return self._counted(self._parse(kind_of, body))
        return self._counted(await asyncio.to_thread(self._parse, kind_of, body))

    def validate(self, kind: type[RequestT], data: dict[str, object]) -> RequestT:
        """Validate parsed JSON. A part of ``data`` may already be a validated model. Raises: as ``parse``."""
        return self._counted(self._validate(kind, data))

    def _counted(self, parsed: tuple[RequestT, int]) -> RequestT:
        """Count the unknown fields. On the event loop's thread, because counting is not safe in several threads."""
        request, num_unknown_fields = parsed
        if num_unknown_fields:
            self._count_unknown_fields(num_unknown_fields)
        return request

    def _validate(self, kind: type[RequestT], data: dict[str, object]) -> tuple[RequestT, int]:
        """The request, and the number of its fields that are unknown."""
        context = RequestContext(self._settings)
        try:
            request = kind.model_validate(data, context=context)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            param, _ = _place_and_text(first)
            code = "unknown_parameter" if first["type"] == "extra_forbidden" else None
            raise InvalidRequestError(describe_problems(error), param or None, code) from None
        return request, context.num_unknown_fields

    def _parse(self, kind_of: Callable[[dict[str, Any]], type[RequestT]], body: bytes) -> tuple[RequestT, int]:
        data = parse_json(body)
        if not isinstance(data, dict):
            raise InvalidRequestError("the body must be a JSON object", code="invalid_json")
        return self._validate(kind_of(data), data)


def parse_json(text: bytes) -> Any:
    """The value of a JSON text of a client. Raises: InvalidRequestError if it is invalid, or has very many values."""
    if len(text) >= _LARGE_BODY_BYTES:
        _check_num_values(text)
    try:
        return from_json(text)
    except ValueError:
        # The parser's own text names its internal limits and does not help a client.
        raise InvalidRequestError("the body is not valid JSON", code="invalid_json") from None


def _check_num_values(text: bytes) -> None:
    """Raises: InvalidRequestError for more values than any chat or prompt has, because making them holds Python's lock,
    which delays all streams: 8 MB of small lists took 0.8 s.
    """
    unescaped = text.replace(rb"\\", b"").replace(rb"\"", b"")
    if unescaped.count(b'"') <= 2 * _MAX_STRINGS:
        outside_strings = b"".join(unescaped.split(b'"')[::2])
        num_containers_and_fields = sum(map(outside_strings.count, (b"[", b"{", b":")))
        if num_containers_and_fields <= _MAX_STRUCTURE and outside_strings.count(b",") <= _MAX_VALUES:
            return
    raise InvalidRequestError(
        f"the body has more than {_MAX_STRUCTURE} lists, objects and fields, or {_MAX_STRINGS} strings, or "
        f"{_MAX_VALUES} values",
        code="invalid_json",
    )


@contextmanager
def problems_of(part: str) -> Iterator[None]:
    """Say of a problem in this block that it is one of this part of the field, as "message 3".

    Raises: PydanticCustomError in place of ValidationError.
    """
    try:
        yield
    except ValidationError as error:
        raise wrong(f"{part}: {describe_problems(error)}") from None


def describe_problems(error: ValidationError) -> str:
    """At most ten of the problems, each with its field."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    texts = [": ".join(filter(None, _place_and_text(problem))) for problem in problems[:_MAX_PROBLEMS]]
    if len(problems) > _MAX_PROBLEMS:
        texts.append("and more")
    return "; ".join(texts)


def _place_and_text(problem: ErrorDetails) -> tuple[str, str]:
    """The wrong field and its problem. The field's name is cut short, because the client may have made it up."""
    text = problem["msg"]
    place = ".".join(_shorten(str(part)) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        text = "this field is unknown or not supported"
    elif problem["type"] == "actorserve":
        named, separator, rest = text.partition(": ")  # an error about several fields begins with the field to change
        if separator and (not place or named.isidentifier()):
            place, text = ".".join(filter(None, (place, named))), rest
    return place, text[:1].lower() + text[1:]


def _shorten(name: str) -> str:
    printable = "".join(char if char.isprintable() else "?" for char in name[: _MAX_NAME_CHARS + 1])
    return printable if len(printable) <= _MAX_NAME_CHARS else printable[:_MAX_NAME_CHARS] + "..."

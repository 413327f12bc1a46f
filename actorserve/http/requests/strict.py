"""The base of all parts of a request: strict types, and a fixed way to treat fields that do not matter.

A number in quotes, a boolean for an integer, NaN or an infinity is an error. ``null`` means the default. A field that
no model declares is ignored and counted, because clients send each other's extensions and send back what they were
given; ``http.unknown_fields`` can make it an error. A declared field that this server cannot honour accepts only the
values that change nothing (``only``), because an answer that ignores the others would be wrong.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from actorserve.settings import HttpSettings

_MAX_FIELDS = 128


@dataclass(slots=True)
class RequestContext:
    """What the validation of one request needs: the configurable limits, and a count of the fields it ignored."""

    settings: HttpSettings
    num_unknown_fields: int = 0


def context_of(info: ValidationInfo) -> RequestContext:
    """The context that the validation was called with. Nested models are validated with the same context."""
    assert isinstance(info.context, RequestContext)
    return info.context


def limits(info: ValidationInfo) -> HttpSettings:
    """The settings that the validation was called with."""
    return context_of(info).settings


def wrong(message: str) -> PydanticCustomError:
    """A validation problem in our own words; braces in ``message`` stay as they are."""
    return PydanticCustomError("actorserve", "{message}", {"message": message})


class StrictFields(BaseModel):
    """Base of all parts of a request: strict types, finite numbers, and not too many fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, dict):
            return value
        if len(value) > _MAX_FIELDS:
            raise wrong(f"an object has more than {_MAX_FIELDS} fields")
        unknown = value.keys() - {field.alias or name for name, field in cls.model_fields.items()}
        if not unknown or limits(info).unknown_fields == "refuse":
            return value
        context_of(info).num_unknown_fields += len(unknown)
        return {name: item for name, item in value.items() if name not in unknown}


def null_is(default: object) -> BeforeValidator:
    """``null`` in place of a value means its default, as in OpenAI's API."""
    return BeforeValidator(lambda value: default if value is None else value)


def parsed_by(parse: Callable[..., object], written_as: Any) -> PlainValidator:
    """For a field that our own code checks, with the type that clients write, which the OpenAPI document shows."""
    return PlainValidator(parse, json_schema_input_type=written_as)


def only(*accepted: object, instead: str = "") -> PlainValidator:
    """For a field that is not supported: its value must be ``null`` or one of ``accepted``, which change nothing.

    ``instead`` names the field to use in its place.
    """
    shown = " or ".join(json.dumps(value) for value in (*accepted, None))
    advice = f"use {instead}" if instead else f"only {shown} is accepted"

    def check(value: Any) -> None:
        # Python takes True for 1; a client that sends true means something else.
        if value is not None and not any(value == item and _is_bool(value) == _is_bool(item) for item in accepted):
            raise wrong(f"not supported; {advice}")

    # The description keeps Python from taking the type of only(1) for that of only(True).
    schema = WithJsonSchema({"enum": [*accepted, None], "description": f"only {shown}"})
    return parsed_by(check, Annotated[Any, schema])


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


_AnyValue = Annotated[Any, WithJsonSchema({"description": "ignored"})]
Ignored = Annotated[None, parsed_by(lambda _: None, _AnyValue)]
"""The type of a field that changes no answer, whatever its value."""

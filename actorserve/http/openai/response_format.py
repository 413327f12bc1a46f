"""The fields that ask for structured output: OpenAI's ``response_format`` and vLLM's ``structured_outputs``."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import from_json

from actorserve.http.requests.fields import SamplingFields
from actorserve.http.requests.json_values import bounded_object
from actorserve.http.requests.strict import StrictFields, only, parsed_by, wrong
from actorserve.http.structured.grammars import Grammars

_MAX_CHOICES = 10_000
_OLD_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
}
"""vLLM's names of structured outputs before it had one field for all of them."""
_ANY_OBJECT = {"type": "object"}


class JsonSchemaFormat(StrictFields):
    """``strict`` changes nothing: every answer follows the schema, and a keyword that is not supported is an error."""

    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any], parsed_by(bounded_object, dict[str, Any]), Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(StrictFields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_belongs_to_its_type(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise wrong('json_schema: belongs to type "json_schema", and that type needs it')
        return self


def _parse_schema(value: object) -> dict[str, Any] | None:
    if isinstance(value, str):
        try:
            value = from_json(value)
        except ValueError:
            raise wrong("is not valid JSON") from None
    return None if value is None else bounded_object(value)


def _parse_choice(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise wrong("must be a list of at least one string")
    if len(value) > _MAX_CHOICES:
        raise wrong(f"has more than {_MAX_CHOICES} strings")
    return tuple(value)


class StructuredOutputs(StrictFields):
    """One of the first five says what the answer must be. ``grammar`` is Lark or GBNF.

    ``whitespace_pattern`` and ``disable_any_whitespace`` say what may stand between the parts of a JSON text.
    """

    json_: Annotated[dict[str, Any] | None, parsed_by(_parse_schema, dict[str, Any] | str), Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[tuple[str, ...] | None, parsed_by(_parse_choice, list[str])] = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Annotated[None, only(False)] = None
    structural_tag: Annotated[None, only()] = None

    @model_validator(mode="after")
    def _has_one_kind(self) -> "StructuredOutputs":
        kinds = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(kind is not None for kind in kinds) != 1:
            raise wrong("must have exactly one of json, regex, choice, grammar and json_object: true")
        return self


class StructuredFields(SamplingFields):
    """The fields of requests whose answer may be structured."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="before")
    @classmethod
    def _take_old_names(cls, value: object) -> object:
        """Read the names that vLLM had before."""
        if not isinstance(value, dict) or _OLD_NAMES.keys().isdisjoint(value):
            return value
        old = {_OLD_NAMES[name]: given for name, given in value.items() if name in _OLD_NAMES and given is not None}
        rest = {name: given for name, given in value.items() if name not in _OLD_NAMES}
        if old and rest.get("structured_outputs") is not None:
            raise wrong("structured_outputs: cannot be together with the older names guided_json, guided_regex, ...")
        return rest | ({"structured_outputs": old} if old else {})

    @model_validator(mode="after")
    def _one_field_asks_for_structure(self) -> "StructuredFields":
        has_format = self.response_format is not None and self.response_format.type != "text"
        if has_format and self.structured_outputs is not None:
            raise wrong("structured_outputs: cannot be together with response_format")
        return self


async def grammar_of(fields: StructuredFields, grammars: Grammars) -> str:
    """The grammar that the answer must follow, "" for any text.

    Raises: InvalidRequestError, RequestFailedError as ``Grammars`` does.
    """
    if fields.structured_outputs is not None:
        return await _grammar_of_outputs(fields.structured_outputs, grammars)
    wanted = fields.response_format
    if wanted is None or wanted.type == "text":
        return ""
    if wanted.json_schema is None:
        return await grammars.from_schema(_ANY_OBJECT, "response_format")
    return await grammars.from_schema(wanted.json_schema.json_schema, "response_format.json_schema.schema")


async def _grammar_of_outputs(wanted: StructuredOutputs, grammars: Grammars) -> str:
    whitespace = "" if wanted.disable_any_whitespace else wanted.whitespace_pattern
    if wanted.regex is not None:
        return await grammars.from_regex(wanted.regex, "structured_outputs.regex")
    if wanted.choice is not None:
        return await grammars.from_choices(wanted.choice, "structured_outputs.choice")
    if wanted.grammar is not None:
        return await grammars.from_ebnf(wanted.grammar, "structured_outputs.grammar")
    if wanted.json_ is not None:
        return await grammars.from_schema(wanted.json_, "structured_outputs.json", whitespace)
    return await grammars.from_schema(_ANY_OBJECT, "structured_outputs.json_object", whitespace)

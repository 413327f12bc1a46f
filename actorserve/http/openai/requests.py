"""The requests of both endpoints, and their parsing. A wrong body gives an error that names the field."""

import asyncio
from typing import Annotated, TypeVar

from pydantic import Field, PlainValidator, ValidationError, ValidationInfo, model_validator
from pydantic_core import ErrorDetails, from_json

from actorserve.errors import InvalidRequestError
from actorserve.http.requests.fields import (
    Role,
    SamplingFields,
    StrictFields,
    is_token_ids,
    limits,
    parse_text_parts,
    wrong,
)
from actorserve.settings import HttpSettings

_MAX_PROBLEMS = 10
_MAX_NAME_CHARS = 64
_LARGE_BODY_BYTES = 64 * 1024
"""Bodies of this size or more are parsed in another thread, because parsing would delay all streams."""

Prompt = str | tuple[int, ...]


class ChatMessage(StrictFields):
    """One turn. ``developer`` is OpenAI's newer name for ``system``, the name that templates know."""

    role: Role
    content: Annotated[str, PlainValidator(parse_text_parts)]
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None

    def for_template(self) -> dict[str, str]:
        """The turn in the form that chat templates expect."""
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        return message


def _parse_messages(value: object) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list) or not value:
        raise wrong("must be a list of at least one message")
    messages = []
    for index, item in enumerate(value):
        try:
            messages.append(ChatMessage.model_validate(item))
        except ValidationError as error:
            raise wrong(f"message {index}: {_describe(error)}") from None
    return tuple(messages)


def _parse_prompt(value: object, info: ValidationInfo) -> tuple[Prompt, ...]:
    most = limits(info).max_choices
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise wrong("must be a string, a list of strings, a list of token ids, or a list of those lists")
    if isinstance(value[0], int):
        if not is_token_ids(value):
            raise wrong("has an item that is not a token id")
        return (tuple(value),)
    if len(value) > most:
        raise wrong(f"has more than {most} prompts")
    prompts: list[Prompt] = []
    for item in value:
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and is_token_ids(item):
            prompts.append(tuple(item))
        else:
            raise wrong("must be a string, a list of strings, a list of token ids, or a list of those lists")
    return tuple(prompts)


class ChatRequest(SamplingFields):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[tuple[ChatMessage, ...], PlainValidator(_parse_messages)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _chat_fields_agree(self, info: ValidationInfo) -> "ChatRequest":
        most = limits(info).max_top_logprobs
        if self.top_logprobs is not None and self.top_logprobs > most:
            raise wrong(f"top_logprobs: must be at most {most}")
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs: only with logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise wrong("max_tokens: differs from max_completion_tokens; give one of them")
        return self


class CompletionRequest(SamplingFields):
    """The body of ``/v1/completions``."""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_parse_prompt)]
    logprobs: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _completion_fields_agree(self, info: ValidationInfo) -> "CompletionRequest":
        if self.logprobs is not None and self.logprobs > limits(info).max_top_logprobs:
            raise wrong(f"logprobs: must be at most {limits(info).max_top_logprobs}")
        if self.n * len(self.prompt) > limits(info).max_choices:
            raise wrong(f"n: times the number of prompts must be at most {limits(info).max_choices}")
        return self


RequestT = TypeVar("RequestT", bound=SamplingFields)


async def parse_request(kind: type[RequestT], body: bytes, settings: HttpSettings) -> RequestT:
    """Validate a body. Raises: InvalidRequestError that names at most ten problems and repeats no long input."""
    if len(body) < _LARGE_BODY_BYTES:
        return _parse(kind, body, settings)
    return await asyncio.to_thread(_parse, kind, body, settings)


def _parse(kind: type[RequestT], body: bytes, settings: HttpSettings) -> RequestT:
    try:
        data = from_json(body)
    except ValueError:
        # The parser's own text names its internal limits and does not help a client.
        raise InvalidRequestError("the body is not valid JSON", code="invalid_json") from None
    if not isinstance(data, dict):
        raise InvalidRequestError("the body must be a JSON object", code="invalid_json")
    try:
        return kind.model_validate(data, context=settings)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param, _ = _place_and_text(first)
        code = "unknown_parameter" if first["type"] == "extra_forbidden" else None
        raise InvalidRequestError(_describe(error), param or None, code) from None


def _describe(error: ValidationError) -> str:
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
    elif not place and problem["type"] == "actorserve":
        named, separator, rest = text.partition(": ")  # an error about several fields begins with the field to change
        place, text = (named, rest) if separator else (place, text)
    return place, text[:1].lower() + text[1:]


def _shorten(name: str) -> str:
    printable = "".join(char if char.isprintable() else "?" for char in name[: _MAX_NAME_CHARS + 1])
    return printable if len(printable) <= _MAX_NAME_CHARS else printable[:_MAX_NAME_CHARS] + "..."

"""The fields that chat and completion requests share, with the ranges that OpenAI and vLLM give them.

Validation is strict: a number in quotes, a boolean for an integer, NaN or an infinity is an error. An unknown field is
also an error, because an answer that ignores it could be wrong. ``null`` means the default.
Plain loops check lists and stop at the first problem, so that a million wrong items do not cause a million errors.
The configurable limits come with the validation's context (``HttpSettings``).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from actorserve.settings import HttpSettings

_MAX_FIELDS = 64
_MAX_BIASED_TOKENS = 1024
_MAX_STOP_TOKENS = 128
_INT32_MAX = 2**31 - 1


def limits(info: ValidationInfo) -> HttpSettings:
    """The settings that the validation was called with."""
    assert isinstance(info.context, HttpSettings)
    return info.context


def wrong(message: str) -> PydanticCustomError:
    """A validation problem in our own words; braces in ``message`` stay as they are."""
    return PydanticCustomError("actorserve", "{message}", {"message": message})


def is_token_ids(value: object) -> bool:
    """Whether ``value`` is a list of integers only (a boolean is not one)."""
    return isinstance(value, list) and all(type(item) is int for item in value)


class StrictFields(BaseModel):
    """Base of all parts of a request: strict types, finite numbers, no unknown and not too many fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > _MAX_FIELDS:
            raise wrong(f"an object has more than {_MAX_FIELDS} fields")
        return value


def _parse_stop(value: object, info: ValidationInfo) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if given is None:
        return ()
    if not isinstance(given, list):
        raise wrong("must be a string or a list of strings")
    bounds = limits(info)
    if len(given) > bounds.max_stop_strings:
        raise wrong(f"has more than {bounds.max_stop_strings} stop strings")
    for item in given:
        if not isinstance(item, str):
            raise wrong("must be a string or a list of strings")
        if not 1 <= len(item) <= bounds.max_stop_chars:
            raise wrong(f"a stop string must have 1 to {bounds.max_stop_chars} characters")
    return tuple(given)


def _parse_stop_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, list) and len(value) > _MAX_STOP_TOKENS:
        raise wrong(f"has more than {_MAX_STOP_TOKENS} token ids")
    if not isinstance(value, list) or not is_token_ids(value):
        raise wrong("must be a list of token ids")
    return tuple(value)


def _parse_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise wrong("must be an object of token ids and biases")
    if len(value) > _MAX_BIASED_TOKENS:
        raise wrong(f"has more than {_MAX_BIASED_TOKENS} token ids")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10):
            raise wrong("its keys must be token ids, in decimal digits")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise wrong("its values must be numbers from -100 to 100")
        if int(key) in biases:
            raise wrong("names a token id twice")
        biases[int(key)] = float(bias)
    return tuple(sorted(biases.items()))


def _null_is(default: object) -> BeforeValidator:
    """``null`` in place of a value means its default, as in OpenAI's API."""
    return BeforeValidator(lambda value: default if value is None else value)


class StreamOptions(StrictFields):
    """Whether a stream reports its usage: at its end, or with every chunk."""

    include_usage: Annotated[bool, _null_is(False)] = False
    continuous_usage_stats: Annotated[bool, _null_is(False)] = False


class SamplingFields(StrictFields):
    """The fields of both endpoints. ``temperature`` 0 is greedy; ``top_k`` 0 and -1 switch top-k off."""

    model: Annotated[str, Field(max_length=256)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_INT32_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX), _null_is(0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2), _null_is(1.0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1), _null_is(1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=_INT32_MAX), _null_is(0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1), _null_is(0.0)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2), _null_is(0.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), _null_is(0.0)] = 0.0
    # Beyond these bounds a float32 logit would overflow. Real clients do not reach them.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100), _null_is(1.0)] = 1.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(_parse_logit_bias)] = ()
    stop: Annotated[tuple[str, ...], PlainValidator(_parse_stop)] = ()
    stop_token_ids: Annotated[tuple[int, ...], PlainValidator(_parse_stop_token_ids)] = ()
    ignore_eos: Annotated[bool, _null_is(False)] = False
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    n: Annotated[int, Field(ge=1), _null_is(1)] = 1
    stream: Annotated[bool, _null_is(False)] = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=_INT32_MAX)] | None = None  # lower is more urgent
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None  # 1 KiB on the wire, at most

    @model_validator(mode="after")
    def _fields_agree(self, info: ValidationInfo) -> "SamplingFields":
        if self.n > limits(info).max_choices:
            raise wrong(f"n: must be at most {limits(info).max_choices}")
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options: only with stream: true")
        return self


def parse_text_parts(value: object) -> str:
    """A message's content: a string, or a list of ``{"type": "text", "text": ...}`` joined by newlines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise wrong("must be a string or a list of text parts")
    return "\n".join(_text_of(part) for part in value)


def _text_of(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise wrong('a part must be {"type": "text", "text": ...}; only text is supported')
    if len(part) != 2:
        raise wrong("a text part has a field other than type and text")
    text: str = part["text"]
    return text


Role = Literal["system", "developer", "user", "assistant"]

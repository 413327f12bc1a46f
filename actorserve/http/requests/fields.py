"""The fields that chat and completion requests share, with the ranges that OpenAI and vLLM give them.

Plain loops check lists and stop at the first problem, so that a million wrong items do not cause a million errors.
The configurable limits come with the validation's context (``HttpSettings``).
"""

from typing import Annotated

from pydantic import Field, ValidationInfo, model_validator

from actorserve.http.requests.strict import Ignored, StrictFields, limits, null_is, only, parsed_by, wrong

_MAX_BIASED_TOKENS = 1024
_MAX_STOP_TOKENS = 128
_MAX_SHOWN_KEYS = 8
_MAX_SHOWN_CHARS = 32
_INT32_MAX = 2**31 - 1
TokenId = Annotated[int, Field(ge=0)]
_Bias = Annotated[float, Field(ge=-100, le=100)]


def is_token_ids(value: object) -> bool:
    """Whether ``value`` is a list of integers only (a boolean is not one)."""
    return isinstance(value, list) and all(type(item) is int for item in value)


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


def _is_token_id(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10


def _parse_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise wrong("must be an object of token ids and biases")
    if len(value) > _MAX_BIASED_TOKENS:
        raise wrong(f"has more than {_MAX_BIASED_TOKENS} token ids")
    if wrong_keys := [key for key in value if not _is_token_id(key)]:
        shown = ", ".join(repr(str(key)[:_MAX_SHOWN_CHARS]) for key in wrong_keys[:_MAX_SHOWN_KEYS])
        raise wrong(f"its keys must be token ids, in decimal digits, and not {shown}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise wrong(f"its values must be numbers from -100 to 100, also that of {key}")
        if int(key) in biases:
            raise wrong(f"names the token id {int(key)} twice")
        biases[int(key)] = float(bias)
    return tuple(sorted(biases.items()))


class StreamOptions(StrictFields):
    """Whether a stream reports its usage at its end, and if so, with every chunk as well."""

    include_usage: Annotated[bool, null_is(False)] = False
    continuous_usage_stats: Annotated[bool, null_is(False)] = False
    include_obfuscation: Ignored = None


class HarmlessFields(StrictFields):
    """Fields of other servers that clients send without a need.

    Some of them change no answer. The others are accepted only with the values that change nothing.
    """

    metadata: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    request_id: Ignored = None
    spaces_between_special_tokens: Ignored = None
    session_id: Ignored = None
    store: Annotated[None, only(False)] = None
    moderation: Annotated[None, only()] = None
    use_beam_search: Annotated[None, only(False)] = None
    length_penalty: Annotated[None, only(1)] = None
    skip_special_tokens: Annotated[None, only(True)] = None
    include_stop_str_in_output: Annotated[None, only(False)] = None
    truncate_prompt_tokens: Annotated[None, only()] = None
    allowed_token_ids: Annotated[None, only([])] = None
    logprob_token_ids: Annotated[None, only([])] = None
    thinking_token_budget: Annotated[None, only()] = None
    repetition_detection: Annotated[None, only()] = None
    bad_words: Annotated[None, only([])] = None
    logits_processors: Annotated[None, only([])] = None
    kv_transfer_params: Annotated[None, only()] = None
    vllm_xargs: Annotated[None, only()] = None


class SamplingFields(HarmlessFields):
    """The fields of both endpoints. ``temperature`` 0 is greedy; ``top_k`` 0 and -1 switch top-k off."""

    model: Annotated[str, Field(max_length=256)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_INT32_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX), null_is(0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2), null_is(1.0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1), null_is(1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=_INT32_MAX), null_is(0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1), null_is(0.0)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2), null_is(0.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), null_is(0.0)] = 0.0
    # Beyond these bounds a float32 logit would overflow. Real clients do not reach them.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100), null_is(1.0)] = 1.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], parsed_by(_parse_logit_bias, dict[str, _Bias])] = ()
    stop: Annotated[tuple[str, ...], parsed_by(_parse_stop, str | list[str])] = ()
    stop_token_ids: Annotated[tuple[int, ...], parsed_by(_parse_stop_token_ids, list[TokenId])] = ()
    ignore_eos: Annotated[bool, null_is(False)] = False
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    n: Annotated[int, Field(ge=1), null_is(1)] = 1
    stream: Annotated[bool, null_is(False)] = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=_INT32_MAX)] | None = None  # lower is more urgent
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None  # 1 KiB on the wire, at most
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _fields_agree(self, info: ValidationInfo) -> "SamplingFields":
        if self.n > limits(info).max_choices:
            raise wrong(f"n: must be at most {limits(info).max_choices}")
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options: only with stream: true")
        if self.prompt_logprobs is not None and self.prompt_logprobs > limits(info).max_top_logprobs:
            raise wrong(f"prompt_logprobs: must be at most {limits(info).max_top_logprobs}")
        if self.prompt_logprobs is not None and self.stream:
            raise wrong("prompt_logprobs: only without stream; echo and logprobs give them in a completion's stream")
        return self

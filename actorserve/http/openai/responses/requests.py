"""The body of ``/v1/responses``, and the chat that it becomes.

The API's default for ``store`` is true, and SDKs omit it. This server keeps nothing, so an omitted ``store`` is false
here, as every answer says.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, WithJsonSchema, model_validator

from actorserve.http.answers.answer_format import Json
from actorserve.http.openai.chat.messages import ChatMessage, with_system_prompt
from actorserve.http.openai.responses.items import parse_input
from actorserve.http.openai.responses.tools import Choice, OfferedTools, parse_choice, parse_offered_tools
from actorserve.http.requests.fields import SamplingFields
from actorserve.http.requests.strict import Ignored, StrictFields, limits, null_is, only, parsed_by, wrong

_LOGPROBS = "message.output_text.logprobs"
_MAX_INCLUDED = 32
_MAX_METADATA = 16
CHAT_FIELDS = {
    "messages": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""What the fields of a chat are called in this API."""


def _parse_included(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > _MAX_INCLUDED or not all(isinstance(item, str) for item in value):
        raise wrong(f"must be a list of at most {_MAX_INCLUDED} strings")
    return tuple(value)


def _parse_metadata(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > _MAX_METADATA:
        raise wrong(f"must be an object of at most {_MAX_METADATA} strings")
    for key, text in value.items():
        if len(key) > 64 or not isinstance(text, str) or len(text) > 512:
            raise wrong("its keys may have 64 characters, and its values are strings of at most 512")
    return value


def _parse_format(value: Any) -> Json:
    match value:
        case None:
            return {"type": "text"}
        case {"type": "text" | "json_object" | "json_schema"}:
            given: Json = value
            return given
        case _:
            raise wrong("its type must be text, json_object or json_schema")


class ReasoningOptions(StrictFields):
    """How much a model should think. Reasoning is always given in full, so there is no summary to ask for."""

    effort: Annotated[str, Field(max_length=32)] | None = None
    summary: Ignored = None
    generate_summary: Ignored = None
    context: Ignored = None


class TextOptions(StrictFields):
    """The form of the answer's text. ``format`` is checked as a part of the chat."""

    format: Annotated[Json, parsed_by(_parse_format, dict[str, Any])] = Field(default_factory=lambda: {"type": "text"})
    verbosity: Annotated[str, Field(max_length=32)] | None = None

    def response_format(self) -> Json:
        """The format as the field of a chat."""
        if self.format["type"] != "json_schema":
            return self.format
        schema = {name: value for name, value in self.format.items() if name != "type"}
        return {"type": "json_schema", "json_schema": schema}


class HarmlessResponseFields(StrictFields):
    """Fields for what this server does not do. They are accepted only with the values that ask for nothing."""

    previous_response_id: Annotated[None, only()] = None
    conversation: Annotated[None, only()] = None
    background: Annotated[None, only(False)] = None
    prompt: Annotated[None, only()] = None
    truncation: Annotated[None, only("disabled")] = None
    context_management: Annotated[None, only([])] = None
    max_tool_calls: Ignored = None  # it limits built-in tools, and there are none
    client_metadata: Ignored = None
    access_programs: Ignored = None


class ResponsesRequest(SamplingFields, HarmlessResponseFields):
    """One call of the API. ``input`` has become messages. A response is one answer, so ``n`` is 1."""

    input: Annotated[tuple[ChatMessage, ...], parsed_by(parse_input, str | list[dict[str, Any]])]
    instructions: str | None = None
    tools: Annotated[OfferedTools, parsed_by(parse_offered_tools, list[dict[str, Any]])] = OfferedTools()
    tool_choice: Annotated[Choice, parsed_by(parse_choice, str | dict[str, Any])] = Choice()
    parallel_tool_calls: Annotated[bool, null_is(True)] = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0), null_is(0)] = 0
    include: Annotated[tuple[str, ...], parsed_by(_parse_included, list[str])] = ()
    metadata: Annotated[Any, parsed_by(_parse_metadata, dict[str, str])] = Field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] | None = None
    n: Annotated[Literal[1], null_is(1), WithJsonSchema({"enum": [1, None]})] = 1
    max_tokens: Annotated[None, only(instead="max_output_tokens")] = None
    prompt_logprobs: Annotated[None, only()] = None
    return_token_ids: Annotated[None, only(False)] = None

    @model_validator(mode="after")
    def _response_fields_agree(self, info: ValidationInfo) -> "ResponsesRequest":
        if self.top_logprobs > limits(info).max_top_logprobs:
            raise wrong(f"top_logprobs: must be at most {limits(info).max_top_logprobs}")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs > 0 or _LOGPROBS in self.include

    def to_chat(self) -> Json:
        """The fields of the chat that gives this response. The limit of tokens is left to the caller."""
        text = self.text or TextOptions.model_construct()
        chat: Json = {
            **self._sampling_fields(),
            "messages": with_system_prompt(self.instructions, self.input),
            "tools": self.tool_choice.allowed(self.tools.functions),
            "tool_choice": self.tool_choice.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": text.response_format(),
            "verbosity": text.verbosity,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if self.wants_logprobs:
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return chat

    def _sampling_fields(self) -> Json:
        """The sampling fields that the client gave, as they stand in a body."""
        names = SamplingFields.model_fields.keys() & self.model_fields_set
        given = {name: getattr(self, name) for name in sorted(names - {"metadata", "stream_options"})}
        return given | {
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
            "logit_bias": {str(token_id): bias for token_id, bias in self.logit_bias},
        }

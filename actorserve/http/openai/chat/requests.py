"""The body of ``/v1/chat/completions``."""

from typing import Annotated, Any

from pydantic import Field, ValidationInfo, model_validator

from actorserve.http.openai.chat.messages import ChatMessage, Messages, parse_messages
from actorserve.http.openai.chat.tools import (
    ChoiceOfTool,
    NamedTool,
    Tool,
    ToolChoice,
    ToolOfChat,
    parse_tool_choice,
    parse_tools,
)
from actorserve.http.openai.response_format import StructuredFields
from actorserve.http.requests.json_values import bounded_object, check_bounds
from actorserve.http.requests.strict import Ignored, StrictFields, limits, null_is, only, parsed_by, wrong

_MAX_TEMPLATE_ARGUMENTS = 32
_MAX_DOCUMENTS = 128
_NOT_TEMPLATE_ARGUMENTS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
"""A template argument of these names would replace what other fields of the request say."""


def _parse_template_arguments(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    arguments = bounded_object(value)
    if len(arguments) > _MAX_TEMPLATE_ARGUMENTS:
        raise wrong(f"has more than {_MAX_TEMPLATE_ARGUMENTS} arguments")
    for name in arguments:
        if not (name.isascii() and name.isidentifier() and len(name) <= 64) or name.startswith("_"):
            raise wrong("its names must be identifiers of at most 64 characters")
        if name in _NOT_TEMPLATE_ARGUMENTS:
            raise wrong(f"must not replace {name}")
    return arguments


def _parse_documents(value: object) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > _MAX_DOCUMENTS:
        raise wrong(f"must be a list of at most {_MAX_DOCUMENTS} objects")
    check_bounds(value)
    return tuple(bounded_object(document) for document in value)


class HarmlessChatFields(StrictFields):
    """Fields of other servers' chats. They change no answer, or are accepted only with values that change nothing."""

    prediction: Ignored = None  # it speeds up an answer, and does not change it
    modalities: Annotated[None, only(["text"])] = None
    audio: Annotated[None, only()] = None
    web_search_options: Annotated[None, only()] = None
    prompt: Annotated[None, only()] = None
    functions: Annotated[None, only([])] = None
    function_call: Annotated[None, only("none", "auto")] = None
    best_of: Annotated[None, only(1)] = None
    suffix: Annotated[None, only()] = None
    chat_template: Annotated[None, only()] = None  # a client's template could loop, and read the server's memory
    chat_template_content_format: Annotated[None, only("auto", "string")] = None
    mm_processor_kwargs: Annotated[None, only({})] = None


class ChatRequest(StructuredFields, HarmlessChatFields):
    """The body of ``/v1/chat/completions``, and the form in which other protocols' chats are served."""

    messages: Annotated[tuple[ChatMessage, ...], parsed_by(parse_messages, Messages)]
    tools: Annotated[tuple[Tool, ...], parsed_by(parse_tools, list[ToolOfChat])] = ()
    tool_choice: Annotated[ToolChoice, parsed_by(parse_tool_choice, ChoiceOfTool)] = "auto"
    parallel_tool_calls: Annotated[bool, null_is(True)] = True
    chat_template_kwargs: Annotated[dict[str, Any], parsed_by(_parse_template_arguments, dict[str, Any])] = Field(
        default_factory=dict
    )
    documents: Annotated[tuple[dict[str, Any], ...], parsed_by(_parse_documents, list[dict[str, Any]])] = ()
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    verbosity: Annotated[str, Field(max_length=32)] | None = None
    add_generation_prompt: Annotated[bool, null_is(True)] = True
    continue_final_message: Annotated[bool, null_is(False)] = False
    add_special_tokens: Annotated[bool, null_is(False)] = False  # before those that the template writes
    echo: Annotated[bool, null_is(False)] = False
    return_tokens_as_token_ids: Annotated[bool, null_is(False)] = False
    return_token_ids: Annotated[bool, null_is(False)] = False
    return_energy: Annotated[bool, null_is(False)] = False
    include_reasoning: Annotated[bool, null_is(True)] = True
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _chat_fields_agree(self, info: ValidationInfo) -> "ChatRequest":
        most = limits(info).max_top_logprobs
        if self.top_logprobs is not None and self.top_logprobs > most:
            raise wrong(f"top_logprobs: must be at most {most}")
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs: only with logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise wrong("max_tokens: differs from max_completion_tokens; give one of them")
        if self.continue_final_message and self.add_generation_prompt:
            raise wrong("continue_final_message: only with add_generation_prompt: false")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise wrong("continue_final_message: only if the last message is the assistant's")
        return self

    @property
    def echoed(self) -> str:
        """What the answer begins with: with ``echo`` the last message's text, if the message is the assistant's."""
        last = self.messages[-1]
        return last.content if self.echo and last.role == "assistant" else ""

    @model_validator(mode="after")
    def _choice_is_a_tool(self) -> "ChatRequest":
        if not self.tools and self.tool_choice not in ("none", "auto"):
            raise wrong("tool_choice: only with tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.name not in {tool.name for tool in self.tools}:
            raise wrong("tool_choice: names a function that is not among the tools")
        return self

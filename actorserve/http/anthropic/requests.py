"""The bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``, and the chats that they become."""

from typing import Annotated, Any, Literal

from pydantic import Field

from actorserve.http.answers.answer_format import Json
from actorserve.http.anthropic.blocks import parse_messages, parse_system
from actorserve.http.anthropic.tools import ToolChoice, parse_tools
from actorserve.http.openai.chat.messages import ChatMessage, with_system_prompt
from actorserve.http.openai.chat.tools import Tool
from actorserve.http.requests.strict import Ignored, StrictFields, null_is, only, parsed_by, wrong

CHAT_FIELDS = {"stop": "stop_sequences", "response_format": "output_config.format"}
"""What the fields of a chat are called in this API."""


class ThinkingOptions(StrictFields):
    """Whether the model should think first. It cannot be told how much."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Ignored = None
    display: Ignored = None

    def template_arguments(self) -> Json:
        """A template's argument. Templates of models that do not think ignore it."""
        match self.type:
            case "enabled":
                return {"enable_thinking": True}
            case "disabled":
                return {"enable_thinking": False}
            case _:
                return {}


def _parse_output_format(value: object) -> Json | None:
    match value:
        case None:
            return None
        case {"type": "json_schema", "schema": dict(schema)}:
            return schema
        case _:
            raise wrong('must be {"type": "json_schema", "schema": ...}')


class OutputOptions(StrictFields):
    """``format`` is the JSON schema that the answer's text must fit."""

    effort: Annotated[str, Field(max_length=32)] | None = None
    format: Annotated[Json | None, parsed_by(_parse_output_format, dict[str, Any])] = None
    task_budget: Ignored = None


class HarmlessFields(StrictFields):
    """Fields that change no answer, and fields for what this server does not do: these accept what asks for nothing."""

    cache_control: Ignored = None
    context_management: Ignored = None
    diagnostics: Ignored = None
    inference_geo: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None
    container: Annotated[None, only()] = None
    mcp_servers: Annotated[None, only([])] = None


class ChatFields(HarmlessFields):
    """What both routes read: all that makes the prompt."""

    model: Annotated[str, Field(max_length=256)]
    messages: Annotated[tuple[ChatMessage, ...], parsed_by(parse_messages, list[dict[str, Any]])]
    system: Annotated[str, parsed_by(parse_system, str | list[dict[str, Any]])] = ""
    tools: Annotated[tuple[Tool, ...], parsed_by(parse_tools, list[dict[str, Any]])] = ()
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def to_chat(self) -> Json:
        """The fields of the chat with this prompt."""
        choice, output = self.tool_choice or ToolChoice(type="auto"), self.output_config
        thinking = self.thinking.template_arguments() if self.thinking is not None else {}
        chat: Json = {
            "model": self.model,
            "messages": with_system_prompt(self.system, self.messages),
            "tools": self.tools,
            "tool_choice": choice.for_chat(),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "reasoning_effort": output.effort if output is not None else None,
            "chat_template_kwargs": {**thinking, **(self.chat_template_kwargs or {})},
        }
        if output is not None and output.format is not None:
            schema = {"name": "output", "schema": output.format, "strict": True}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        last = self.messages[-1]
        if last.role == "assistant" and not last.tool_calls:
            chat |= {"add_generation_prompt": False, "continue_final_message": True}
        return chat


class CountTokensRequest(ChatFields):
    """The body of ``/v1/messages/count_tokens``."""


def _parse_stop_sequences(value: object) -> list[str]:
    """The strings themselves are checked as a part of the chat."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise wrong("must be a list of strings")
    return value


class MessagesRequest(ChatFields):
    """The body of ``/v1/messages``. ``max_tokens`` is a limit: an answer may have to be shorter to fit the context."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]
    temperature: Annotated[float, Field(ge=0, le=1), null_is(1.0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1), null_is(1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1), null_is(0)] = 0
    stop_sequences: Annotated[list[str], parsed_by(_parse_stop_sequences, list[str])] = Field(default_factory=list)
    stream: Annotated[bool, null_is(False)] = False
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None

    def to_chat(self) -> Json:
        """The fields of the chat that gives this answer. The limit of tokens is left to the caller."""
        return {
            **super().to_chat(),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
        }

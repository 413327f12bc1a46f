"""The messages of a chat: all of OpenAI's roles, and whatever an answer of this server holds."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, ValidationInfo, model_validator
from pydantic_core import to_json
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from actorserve.errors import InvalidRequestError
from actorserve.http.requests.parsing import parse_json, problems_of
from actorserve.http.requests.strict import Ignored, StrictFields, null_is, only, parsed_by, wrong

MAX_MESSAGES = 10_000
"""More than any chat has. To check one costs some 40 µs."""
_MAX_CALLS = 128
_MAX_SHOWN_CHARS = 32

Role = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,31}$")]
"""OpenAI's roles are system, developer, user, assistant, tool and function. Some models have more; a chat template may
refuse those that it does not know."""

_MAY_BE_EMPTY = ("assistant", "tool", "function")
"""Messages without any content: an assistant may only call tools, and a tool may return nothing."""
_SYSTEM_ROLES = ("system", "developer")
_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}
"""OpenAI's newer name for the system, and its older name for tools: templates know the other ones."""
_TEXT_OF_PART = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The types of parts that are text, and the field that holds it."""


def _parse_arguments(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return to_json(value).decode()
    if not isinstance(value, str):
        raise wrong("must be a string of JSON")
    return value


class FunctionCall(StrictFields):
    """What a model called, with which arguments: JSON text, as the model wrote it."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[str, parsed_by(_parse_arguments, str | dict[str, Any])] = ""

    def for_template(self) -> dict[str, object]:
        """The arguments as an object, because templates iterate over it. Text that is not an object stays text."""
        if not self.arguments.strip():
            return {"name": self.name, "arguments": {}}
        try:
            arguments = parse_json(self.arguments.encode())
        except InvalidRequestError:
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class ToolCall(StrictFields):
    """A function call in an assistant's message. The tool's answer has the same id."""

    id: Annotated[str, Field(max_length=256), null_is("")] = ""
    type: Annotated[Literal["function"], null_is("function")] = "function"
    function: FunctionCall
    index: Ignored = None


def _parse_calls(value: object, info: ValidationInfo) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise wrong("must be a list of tool calls")
    if len(value) > _MAX_CALLS:
        raise wrong(f"has more than {_MAX_CALLS} calls")
    calls = []
    for index, item in enumerate(value):
        with problems_of(f"call {index}"):
            calls.append(ToolCall.model_validate(item, context=info.context))
    return tuple(calls)


def _parse_content(value: object, info: ValidationInfo) -> str:
    """A string, or a list of text parts, which are joined by line breaks."""
    if isinstance(value, str):
        return value
    if not value and (value is None or isinstance(value, list)) and info.data.get("role") in _MAY_BE_EMPTY:
        return ""
    if not isinstance(value, list) or not value:
        raise wrong("must be a string or a list of text parts")
    return "\n".join(_text_of(part) for part in value)


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise wrong('a part must be {"type": "text", "text": ...}')
    if kind not in _TEXT_OF_PART:
        raise wrong(f"a part has the type {kind[:_MAX_SHOWN_CHARS]!r}; only text is supported")
    text = part.get(_TEXT_OF_PART[kind])
    if not isinstance(text, str):
        raise wrong(f"a part of the type {kind} must have a string as its {_TEXT_OF_PART[kind]}")
    return text


class TextPart(TypedDict):
    """A part of a message's content; it may have further fields. Only text is supported."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: NotRequired[str]
    refusal: NotRequired[str]


class ChatMessage(StrictFields):
    """One turn of a chat. ``content`` is "" if there is none."""

    role: Role
    content: Annotated[str, parsed_by(_parse_content, str | list[str | TextPart])] = ""
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], parsed_by(_parse_calls, list[ToolCall])] = ()
    function_call: FunctionCall | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    audio: Annotated[None, only()] = None
    prefix: Annotated[None, only(False)] = None
    id: Ignored = None
    annotations: Ignored = None
    cache_control: Ignored = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> "ChatMessage":
        if self.role not in _MAY_BE_EMPTY and "content" not in self.model_fields_set:
            raise wrong("content: field required")
        if self.role != "assistant" and (self.tool_calls or self.function_call is not None):
            raise wrong("tool_calls: only in a message of the assistant")
        return self

    def for_template(self) -> dict[str, object]:
        """The turn in the form that chat templates expect. Only fields that hold something are there."""
        message: dict[str, object] = {
            "role": _TEMPLATE_ROLES.get(self.role, self.role),
            "content": self.content or self.refusal or "",
        }
        if self.name is not None:
            message["name"] = self.name
        if reasoning := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = reasoning
        if calls := self._calls():
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.for_template()} for call in calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    def _calls(self) -> tuple[ToolCall, ...]:
        if self.tool_calls or self.function_call is None:
            return self.tool_calls
        return (ToolCall(function=self.function_call),)


Messages = Annotated[list[ChatMessage], Field(min_length=1)]


def parse_messages(value: object, info: ValidationInfo) -> tuple[ChatMessage, ...]:
    """At least one message. Raises: PydanticCustomError that names the first wrong one."""
    if not isinstance(value, list | tuple) or not value:
        raise wrong("must be a list of at least one message")
    if len(value) > MAX_MESSAGES:
        raise wrong(f"has more than {MAX_MESSAGES} messages")
    messages = []
    for index, item in enumerate(value):
        with problems_of(f"message {index}"):
            messages.append(ChatMessage.model_validate(item, context=info.context))
    return tuple(messages)


def with_system_prompt(prompt: str | None, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """``messages`` after a prompt of the system. It is one message with those of the system that begin ``messages``,
    because many templates expect at most one, and only at the beginning.
    """
    num_leading = next((i for i, message in enumerate(messages) if message.role not in _SYSTEM_ROLES), len(messages))
    texts = [text for text in (prompt, *(message.content for message in messages[:num_leading])) if text]
    system = [ChatMessage.model_construct(role="system", content="\n\n".join(texts))] if texts else []
    return [*system, *messages[num_leading:]]

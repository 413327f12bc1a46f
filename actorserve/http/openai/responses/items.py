"""The input of a response: items, and the messages of a chat that they are.

One turn of the assistant is several items: its thoughts, its text and its calls. They become one message, because chat
templates know one message for a turn. Ids and statuses of items are ignored, because nothing is kept here.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, ValidationInfo

from actorserve.http.answers.answer_format import Json
from actorserve.http.openai.chat.messages import MAX_MESSAGES, ChatMessage
from actorserve.http.openai.responses.tools import name_in_prompt
from actorserve.http.requests.parsing import problems_of
from actorserve.http.requests.strict import Ignored, StrictFields, null_is, wrong

_MAX_SHOWN_CHARS = 64


class _Item(StrictFields):
    id: Ignored = None
    status: Ignored = None
    internal_chat_message_metadata_passthrough: Ignored = None  # of Codex


class _MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Any
    phase: Ignored = None


class _CallItem(_Item):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(max_length=256)]
    name: str
    namespace: Annotated[str, null_is("")] = ""
    arguments: Any
    caller: Ignored = None


class _CallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(max_length=256)]
    output: Any
    caller: Ignored = None
    name: Ignored = None


def _parse_texts(value: object) -> str:
    match value:
        case None:
            return ""
        case list():
            return "\n".join(_text_of(part) for part in value)
        case _:
            raise wrong("must be a list of texts")


def _text_of(part: object) -> str:
    match part:
        case {"text": str(text)}:
            return text
        case _:
            raise wrong('a part must be {"type": ..., "text": ...}')


class _ReasoningItem(_Item):
    type: Literal["reasoning"]
    content: Annotated[str, PlainValidator(_parse_texts)] = ""
    summary: Annotated[str, PlainValidator(_parse_texts)] = ""
    encrypted_content: Ignored = None


_KINDS: dict[str, type[_Item]] = {
    "message": _MessageItem,
    "function_call": _CallItem,
    "function_call_output": _CallOutputItem,
    "reasoning": _ReasoningItem,
}


def parse_input(value: object, info: ValidationInfo) -> tuple[ChatMessage, ...]:
    """The messages of an input: a text, or at least one item.

    Raises: PydanticCustomError that names the first wrong item.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise wrong("must be a string or a list of at least one item")
    if len(value) > MAX_MESSAGES:
        raise wrong(f"has more than {MAX_MESSAGES} items")
    messages = _Messages(info)
    for index, given in enumerate(value):
        kind = _kind_of(given, index)
        with problems_of(f"item {index}"):
            messages.add(kind.model_validate(given, context=info.context))
    return messages.finish()


def _kind_of(given: object, index: int) -> type[_Item]:
    kind = given.get("type", "message") if isinstance(given, dict) else None
    if not isinstance(kind, str):
        raise wrong(f"item {index}: must be an object with a type, or a message")
    if kind == "item_reference":
        raise wrong(f"item {index}: this server keeps no items to refer to; send the item itself (store: false)")
    if kind not in _KINDS:
        raise wrong(f"item {index}: items of the type {kind[:_MAX_SHOWN_CHARS]!r} are not supported")
    return _KINDS[kind]


class _Messages:
    """Collects the messages of items. The items of an assistant's turn wait until the turn is over."""

    def __init__(self, info: ValidationInfo) -> None:
        self._info = info
        self._messages: list[ChatMessage] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Json] = []

    def add(self, item: BaseModel) -> None:
        match item:
            case _MessageItem(role="assistant"):
                message = self._message({"role": "assistant", "content": item.content})
                self._texts.append(message.content)
            case _MessageItem():
                self._add({"role": item.role, "content": item.content})
            case _ReasoningItem():
                if thoughts := item.content or item.summary:
                    self._thoughts.append(thoughts)
            case _CallItem():
                name = name_in_prompt(item.namespace, item.name) if item.namespace else item.name
                call = {"id": item.call_id, "function": {"name": name, "arguments": item.arguments}}
                self._message({"role": "assistant", "tool_calls": [call]})  # tells a wrong call by this item's index
                self._calls.append(call)
            case _CallOutputItem():
                self._add({"role": "tool", "tool_call_id": item.call_id, "content": item.output})

    def finish(self) -> tuple[ChatMessage, ...]:
        self._end_turn()
        return tuple(self._messages)

    def _add(self, message: Json) -> None:
        self._end_turn()
        self._messages.append(self._message(message))

    def _end_turn(self) -> None:
        if not (self._texts or self._thoughts or self._calls):
            return
        turn: Json = {"role": "assistant", "content": "\n".join(self._texts), "tool_calls": self._calls}
        if self._thoughts:
            turn["reasoning_content"] = "\n".join(self._thoughts)
        self._messages.append(self._message(turn))
        self._texts, self._thoughts, self._calls = [], [], []

    def _message(self, fields: Json) -> ChatMessage:
        return ChatMessage.model_validate(fields, context=self._info.context)

"""The messages of Anthropic's API, made of blocks, and the messages of a chat that they become.

Results of tools are blocks of the user's message here, and messages of their own in a chat. Thoughts, text and calls of
an assistant's message stay together.
"""

from typing import Annotated, Literal

from pydantic import PlainValidator, ValidationInfo
from pydantic_core import to_json

from actorserve.http.answers.answer_format import Json
from actorserve.http.openai.chat.messages import MAX_MESSAGES, ChatMessage
from actorserve.http.requests.json_values import bounded_object
from actorserve.http.requests.parsing import problems_of
from actorserve.http.requests.strict import Ignored, StrictFields, null_is, wrong

_MAX_SHOWN_CHARS = 64
_ATTRIBUTION = "x-anthropic-billing-header"
"""Claude Code begins a block of its system prompt with this. The block is not meant for the model, and it differs from
request to request, so that no prompt would be found in a prefix cache."""


class _Block(StrictFields):
    cache_control: Ignored = None


class _Text(_Block):
    type: Literal["text"]
    text: str
    citations: Ignored = None
    parsed_output: Ignored = None  # of Anthropic's SDK


class _Thinking(_Block):
    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None


class _RedactedThinking(_Block):
    type: Literal["redacted_thinking"]
    data: Ignored = None


class _ToolUse(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[Json, PlainValidator(bounded_object)]
    caller: Ignored = None
    toolset_name: Ignored = None


def _parse_texts(value: object, info: ValidationInfo) -> str:
    """A string, or a list of blocks of text, which are joined by line breaks."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return "\n".join(block.text for block in _parse_blocks(value, info, _TEXTS) if isinstance(block, _Text))


class _ToolResult(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str, PlainValidator(_parse_texts)] = ""
    is_error: Annotated[bool, null_is(False)] = False

    def text(self) -> str:
        """The result as the model reads it: a chat has no other place to say that the tool failed."""
        return f"Error: {self.content}" if self.is_error else self.content


_TEXTS: dict[str, type[_Block]] = {"text": _Text}
_OF_USER: dict[str, type[_Block]] = {**_TEXTS, "tool_result": _ToolResult}
_OF_ASSISTANT: dict[str, type[_Block]] = {
    **_TEXTS,
    "thinking": _Thinking,
    "redacted_thinking": _RedactedThinking,
    "tool_use": _ToolUse,
}


_OF_ROLE = {"system": _TEXTS, "user": _OF_USER, "assistant": _OF_ASSISTANT}


def _parse_blocks(value: object, info: ValidationInfo, kinds: dict[str, type[_Block]]) -> list[_Block]:
    if not isinstance(value, list):
        raise wrong("must be a string or a list of blocks")
    if len(value) > MAX_MESSAGES:
        raise wrong(f"has more than {MAX_MESSAGES} blocks")
    blocks: list[_Block] = []
    for index, given in enumerate(value):
        kind = given.get("type") if isinstance(given, dict) else None
        if not isinstance(kind, str):
            raise wrong(f"block {index}: must be an object with a type")
        if kind not in kinds:
            raise wrong(f"block {index}: the type {kind[:_MAX_SHOWN_CHARS]!r} is not supported here")
        with problems_of(f"block {index}"):
            blocks.append(kinds[kind].model_validate(given, context=info.context))
    return blocks


def parse_system(value: object, info: ValidationInfo) -> str:
    """The system prompt: a string, or a list of blocks of text."""
    if value is None or isinstance(value, str):
        return value or ""
    texts = [block.text for block in _parse_blocks(value, info, _TEXTS) if isinstance(block, _Text)]
    return "\n\n".join(text for text in texts if not text.startswith(_ATTRIBUTION))


def _parse_content(value: object, info: ValidationInfo) -> list[_Block]:
    if isinstance(value, str):
        return [_Text(type="text", text=value)]
    return _parse_blocks(value, info, _OF_ROLE.get(info.data.get("role", ""), {}))


class _Message(StrictFields):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_Block], PlainValidator(_parse_content)]
    # An answer may be sent back as a whole, with the fields of its head.
    id: Ignored = None
    type: Ignored = None
    model: Ignored = None
    stop_reason: Ignored = None
    stop_sequence: Ignored = None
    stop_details: Ignored = None
    usage: Ignored = None
    container: Ignored = None
    diagnostics: Ignored = None

    def for_chat(self) -> list[Json]:
        """The messages of a chat that say the same. Results of tools come first, because they follow their calls."""
        texts = [block.text for block in self.content if isinstance(block, _Text)]
        if self.role == "assistant":
            return [self._turn(texts)]
        messages: list[Json] = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text()}
            for block in self.content
            if isinstance(block, _ToolResult)
        ]
        if texts:
            messages.append({"role": self.role, "content": "\n".join(texts)})
        return messages

    def _turn(self, texts: list[str]) -> Json:
        turn: Json = {"role": "assistant", "content": "\n".join(texts)}
        if thoughts := "\n".join(block.thinking for block in self.content if isinstance(block, _Thinking)):
            turn["reasoning_content"] = thoughts
        calls = [block for block in self.content if isinstance(block, _ToolUse)]
        if calls:
            turn["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": to_json(call.input).decode()}}
                for call in calls
            ]
        return turn


def _num_blocks(value: object) -> int:
    """A message or block, and all blocks in it."""
    content = value.get("content") if isinstance(value, dict) else None
    return 1 + (sum(map(_num_blocks, content)) if isinstance(content, list) else 0)


def parse_messages(value: object, info: ValidationInfo) -> tuple[ChatMessage, ...]:
    """The messages of a chat. Raises: PydanticCustomError that names the first wrong message."""
    if not isinstance(value, list) or not value:
        raise wrong("must be a list of at least one message")
    if sum(map(_num_blocks, value)) > MAX_MESSAGES:
        raise wrong(f"has more than {MAX_MESSAGES} messages and blocks")
    messages: list[ChatMessage] = []
    for index, given in enumerate(value):
        with problems_of(f"message {index}"):
            for fields in _Message.model_validate(given, context=info.context).for_chat():
                messages.append(ChatMessage.model_validate(fields, context=info.context))
    if not messages:
        raise wrong("must hold at least one block")
    return tuple(messages)

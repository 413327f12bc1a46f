"""The forms of answers under ``/v1/messages``, for the OpenAPI document."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from actorserve.http.openapi.answers import AnswerPart


class MessageErrorDetails(AnswerPart):
    type: str
    message: str


class MessageError(AnswerPart):
    """The body of every answer of these routes whose status is not 200, and of an event ``error`` in a stream."""

    type: Literal["error"]
    error: MessageErrorDetails
    request_id: str


class TextBlock(AnswerPart):
    type: Literal["text"]
    text: str


class ThinkingBlock(AnswerPart):
    """The thoughts before the answer. The signature is empty, because this server believes its clients."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(AnswerPart):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(AnswerPart):
    """The prompt's tokens are the sum of those read from the cache and ``input_tokens``."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(AnswerPart):
    """The answer without ``stream``. It may be sent back as a message of the next request."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(BaseModel):
    """The data of an event with ``stream``. Further fields depend on the type, as in Anthropic's API."""

    model_config = ConfigDict(extra="allow")

    type: str


class TokenCount(AnswerPart):
    input_tokens: int

"""The forms of answers of ``/v1/responses``, for the OpenAPI document."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from actorserve.http.openapi.answers import AnswerPart, ChosenTokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(AnswerPart):
    """The answer's text. ``logprobs`` is empty unless they were asked for."""

    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[ChosenTokenLogprob]


class OutputMessage(AnswerPart):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class ReasoningText(AnswerPart):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(AnswerPart):
    """The thoughts before the answer, in full."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[None]
    content: list[ReasoningText]


class FunctionCallItem(AnswerPart):
    """``arguments`` is JSON text. ``namespace`` is there if the function was offered in one."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class InputTokensDetails(AnswerPart):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(AnswerPart):
    reasoning_tokens: int


class ResponseUsage(AnswerPart):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(AnswerPart):
    reason: Literal["max_output_tokens"]


class Response(AnswerPart):
    """The answer without ``stream``. Its output may be sent back as the input of the next request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    model: str
    output: list[OutputMessage | ReasoningItem | FunctionCallItem]
    usage: ResponseUsage
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    metadata: dict[str, str]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, str | None]
    temperature: float
    top_p: float
    top_logprobs: int
    max_output_tokens: int | None
    max_tool_calls: None
    presence_penalty: float
    frequency_penalty: float
    previous_response_id: None
    conversation: None
    prompt: None
    background: Literal[False]
    store: Literal[False]
    truncation: Literal["disabled"]
    service_tier: str
    safety_identifier: None
    prompt_cache_key: None
    user: str | None


class ResponseEvent(BaseModel):
    """The data of an event with ``stream``. Further fields depend on the type, as in OpenAI's API."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int

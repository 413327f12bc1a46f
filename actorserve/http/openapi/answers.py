"""The forms of answers, for the OpenAPI document. Tests hold the answers to its examples against them."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from actorserve.core.messages import FinishReason


class AnswerPart(BaseModel):
    """Base of all parts of an answer: exactly the declared fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorDetails(AnswerPart):
    """What was wrong. ``param`` is the field to change, and ``code`` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(AnswerPart):
    """The body of every answer whose status is not 200, and of an event in a stream that fails."""

    error: ErrorDetails


class PromptTokensDetails(AnswerPart):
    """``cached_tokens`` were found in a prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(AnswerPart):
    """``reasoning_tokens`` were thoughts."""

    reasoning_tokens: int


class EnergyJoules(AnswerPart):
    """The energy that workers spent on an answer's prompts, and on its tokens."""

    prompt: float
    token: float


class Usage(AnswerPart):
    """Numbers of tokens. A prompt counts once for all of its choices. With ``return_energy`` also the energy, which is
    null where it is not known.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    energy_joules: EnergyJoules | None = None


class TokenLogprob(AnswerPart):
    """A token, its bytes, and the logarithm of its probability; -9999 stands for minus infinity."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenTokenLogprob(TokenLogprob):
    """The token that was chosen, and the likeliest ones at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(AnswerPart):
    content: list[ChosenTokenLogprob]
    refusal: None


class PromptToken(AnswerPart):
    """A token of the prompt, or one that was likely in its place. ``rank`` counts from 1, the likeliest token."""

    logprob: float
    rank: int
    decoded_token: str


PromptTokens = list[dict[str, PromptToken] | None]
"""For each token of the prompt, except the first, by token id: the token itself, and the likeliest ones."""


class CalledFunction(AnswerPart):
    """``arguments`` is JSON text, as the model wrote it."""

    name: str
    arguments: str


class AnswerCall(AnswerPart):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(AnswerPart):
    """The model's turn. It may be sent back as a message of the next request.

    Thoughts and calls are there only if the model has thought or called. ``reasoning`` repeats ``reasoning_content``.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AnswerCall] | None = None


ChatFinishReason = FinishReason | Literal["tool_calls"]


class ChatChoice(AnswerPart):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] | None


class ChatCompletion(AnswerPart):
    """The answer of ``/v1/chat/completions`` without ``stream``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptTokens | None
    prompt_token_ids: list[int] | None


class FunctionDelta(AnswerPart):
    name: str | None = None
    arguments: str


class CallDelta(AnswerPart):
    """What a chunk adds to the call of this ``index``. The first chunk of a call has its id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class MessageDelta(AnswerPart):
    """What a chunk adds to a message. The first chunk of a choice has the role, and the last one adds nothing."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChunkChoice(AnswerPart):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    token_ids: list[int] | None = None


class ChatCompletionChunk(AnswerPart):
    """The data of an event of ``/v1/chat/completions`` with ``stream``; ``[DONE]`` is the last data.

    Only the first chunk has ``prompt_token_ids``, if they were asked for.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(AnswerPart):
    """Columns over the tokens. ``text_offset`` counts characters from the beginning of the text."""

    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(AnswerPart):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: PromptTokens | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(AnswerPart):
    """The answer of ``/v1/completions``, and with ``stream`` the data of an event; ``[DONE]`` is the last data."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(AnswerPart):
    """A name of the served model. ``root`` is the model's own name, which tells aliases apart."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(AnswerPart):
    object: Literal["list"]
    data: list[ModelCard]


class Health(AnswerPart):
    """``instances`` workers are up."""

    status: Literal["ok", "unavailable", "stopping"]
    instances: int


class GenerationHealth(AnswerPart):
    """``seconds`` is how long a token took, or how long it was waited for."""

    status: Literal["ok", "unavailable"]
    seconds: float


class Tokens(AnswerPart):
    """``token_strs`` are the tokens' names in the vocabulary, if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(AnswerPart):
    """The text of the tokens."""

    prompt: str


class Version(AnswerPart):
    version: str


class OpenAPIDocument(BaseModel):
    """This document; it has further fields."""

    openapi: str
    paths: dict[str, object]

"""The form of answers of ``/v1/chat/completions``."""

from collections.abc import Sequence
from dataclasses import replace

from actorserve.core.messages import FinishReason
from actorserve.http.answers.answer_format import Json, WholeChoice
from actorserve.http.answers.choice import AnswerToken, Choice, Piece
from actorserve.http.answers.usage import Usage
from actorserve.http.answers.worker_requests import WorkerRequests
from actorserve.http.chat.deltas import Delta, OutputParser, ReasoningDelta, TextDelta, ToolCallDelta
from actorserve.http.chat.message import Call, Message
from actorserve.http.openai.chat.requests import ChatRequest
from actorserve.http.openai.chat.tool_use import call_finish_reason
from actorserve.http.openai.chunks import AnswerHead, ChunkFormat
from actorserve.http.openai.logprobs import output_ids, shown_logprobs
from actorserve.http.openai.prompt_logprobs import prompt_logprobs_field
from actorserve.http.requests.fields import StreamOptions
from actorserve.model_files.tokenizer import Tokenizer


class ChatFormat(ChunkFormat):
    """The ``AnswerFormat`` of chats. A choice's first chunk has the role, and its last chunk the finish reason.

    A chunk has one delta of text, reasoning or a tool call. A piece's log-probabilities and token ids go out with the
    first chunk that follows it. Where the client wants token ids, the stream's first chunk has those of the prompt.
    """

    def __init__(
        self,
        head: AnswerHead,
        usage: Usage,
        request: ChatRequest,
        tokenizer: Tokenizer,
        work: WorkerRequests,
    ) -> None:
        options = request.stream_options or StreamOptions()
        super().__init__(
            head,
            usage,
            options,
            chunk_type="chat.completion.chunk",
            answer_type="chat.completion",
            has_energy=request.return_energy,
        )
        self._tokenizer = tokenizer
        self._wants_logprobs = work.wants_logprobs
        self._num_prompt_logprobs = work.specs[0].sampling.prompt_logprobs
        self._prompt_token_ids = work.specs[0].prompt_token_ids if request.return_token_ids else None
        self._new_parser = work.new_parser
        self._request = request
        self._parsers: dict[int, OutputParser] = {}  # of the choices whose first chunk was written
        self._num_reasoning_tokens: dict[int, int] = {}
        self._tokens: dict[int, list[AnswerToken]] = {}  # that were not written yet

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        opening = self._opening(choice)
        self._tokens[choice.index] += piece.tokens
        return opening + self._deltas(choice, self._parsers[choice.index].push(piece.text))

    def finish(self, choice: Choice) -> bytes:
        assert choice.end is not None
        opening = self._opening(choice)
        parser = self._parsers[choice.index]
        deltas = self._deltas(choice, parser.finish())
        reason = self._finish_reason(choice.end.reason, parser.has_tool_calls)
        return opening + deltas + self._delta(choice.index, {}, reason)

    def whole(self, choices: Sequence[WholeChoice]) -> Json:
        scores = prompt_logprobs_field(choices[0].prompt_logprobs, self._num_prompt_logprobs, self._tokenizer)
        answer = self._answer([self._whole(index, choice) for index, choice in enumerate(choices)])
        return answer | {"prompt_logprobs": scores, "prompt_token_ids": self._prompt_token_ids}

    def _opening(self, choice: Choice) -> bytes:
        """A choice's first chunk comes before its tokens, so their log-probabilities and their number come later."""
        if choice.index in self._parsers:
            return b""
        further = {"prompt_token_ids": self._prompt_token_ids} if self._prompt_token_ids and not self._parsers else None
        self._parsers[choice.index], self._tokens[choice.index] = self._new_parser(), []
        delta = {"role": "assistant", "content": self._request.echoed}
        fields = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk(fields, choice.num_tokens, further)

    def _deltas(self, choice: Choice, deltas: Sequence[Delta]) -> bytes:
        self._count_thoughts(choice.index, deltas, choice.num_tokens)
        wanted = (delta for delta in deltas if self._is_wanted(delta))
        return b"".join(self._delta(choice.index, _delta_fields(delta)) for delta in wanted)

    def _is_wanted(self, delta: Delta) -> bool:
        return self._request.include_reasoning or not isinstance(delta, ReasoningDelta)

    def _delta(self, index: int, delta: Json, finish_reason: str | None = None) -> bytes:
        tokens = self._tokens[index]
        logprobs = self._logprobs(tokens) if tokens else None
        fields = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._request.return_token_ids:
            fields["token_ids"] = output_ids(tokens)
        tokens.clear()
        return self._chunk(fields)

    def _count_thoughts(self, index: int, deltas: Sequence[Delta], num_tokens: int) -> None:
        """The choice of this index had ``num_tokens`` tokens when the parser gave ``deltas``. Thoughts come first."""
        if deltas and isinstance(deltas[0], ReasoningDelta):
            self._num_reasoning_tokens[index] = num_tokens

    def _usage_fields(self, num_untold: int = 0) -> Json:
        details = {"reasoning_tokens": sum(self._num_reasoning_tokens.values())}
        return super()._usage_fields(num_untold) | {"completion_tokens_details": details}

    def _finish_reason(self, reason: FinishReason, has_tool_calls: bool) -> str:
        """A call that was cut off by ``max_tokens`` keeps that reason, because its arguments are not complete."""
        return call_finish_reason(self._request) if has_tool_calls and reason is FinishReason.STOP else reason

    def _whole(self, index: int, choice: WholeChoice) -> Json:
        parser, message = self._new_parser(), Message()
        for piece, num_tokens in zip(choice.pieces, choice.num_tokens, strict=True):
            deltas = parser.push(piece.text)
            self._count_thoughts(index, deltas, num_tokens)
            message.add(deltas)
        deltas = parser.finish()
        self._count_thoughts(index, deltas, self._usage.choices[index].num_tokens)
        message.add(deltas)
        shown = replace(
            message,
            text=self._request.echoed + message.text,
            reasoning=message.reasoning if self._request.include_reasoning else "",
        )
        return {
            "index": index,
            "message": _message_fields(shown),
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": self._finish_reason(choice.finish_reason, bool(message.calls)),
            "token_ids": output_ids(choice.tokens) if self._request.return_token_ids else None,
        }

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> Json | None:
        if not self._wants_logprobs:
            return None
        as_token_ids = self._request.return_tokens_as_token_ids
        return {"content": shown_logprobs(tokens, self._tokenizer, as_token_ids=as_token_ids), "refusal": None}


def _delta_fields(delta: Delta) -> Json:
    match delta:
        case TextDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return _reasoning_fields(text)
        case ToolCallDelta(index, arguments, id="", name=""):
            return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}
        case ToolCallDelta(index, arguments, call_id, name):
            return {"tool_calls": [{"index": index, **_call_fields(Call(call_id, name, arguments))}]}


def _message_fields(message: Message) -> Json:
    content = None if message.calls and not message.text else message.text
    fields: Json = {"role": "assistant", "content": content, "refusal": None}
    if message.reasoning:
        fields |= _reasoning_fields(message.reasoning)
    if message.calls:
        fields["tool_calls"] = [_call_fields(call) for call in message.calls]
    return fields


def _reasoning_fields(text: str) -> Json:
    """The thoughts under both of their names: most clients read the first one, and vLLM's read the second."""
    return {"reasoning_content": text, "reasoning": text}


def _call_fields(call: Call) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

"""The form of answers of ``/v1/messages``: a message, or the events that build it up block by block."""

from collections.abc import Sequence

from starlette.responses import Response

from actorserve.core.messages import FinishReason
from actorserve.http.answers.answer_format import Json, WholeChoice
from actorserve.http.answers.choice import Choice, Piece
from actorserve.http.answers.usage import Usage
from actorserve.http.anthropic.errors import error_body, error_response
from actorserve.http.anthropic.output import Content, event
from actorserve.http.chat.deltas import OutputParser
from actorserve.http.errors import RequestFailedError

_PING = event("ping", {})


class MessageFormat:
    """The ``AnswerFormat`` of one message, which has a single choice.

    ``max_tokens`` is the limit that the client set. ``request_id`` stands in errors.
    """

    def __init__(
        self, answer_id: str, model: str, usage: Usage, parser: OutputParser, max_tokens: int, request_id: str
    ) -> None:
        self._head = {"id": answer_id, "type": "message", "role": "assistant", "model": model}
        self._usage = usage
        self._parser = parser
        self._max_tokens = max_tokens
        self._request_id = request_id
        self._content = Content()
        self._opened = False

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        return self._opening() + self._content.add(self._parser.push(piece.text))

    def finish(self, choice: Choice) -> bytes:
        return self._opening() + self._finish()

    def keep_alive(self) -> bytes:
        return _PING

    def end(self) -> bytes:
        delta = event("message_delta", {"delta": self._ending(), "usage": self._usage_fields()})
        return delta + event("message_stop", {})

    def fail(self, failure: RequestFailedError) -> bytes:
        return event("error", error_body(failure, self._request_id))

    def refusal(self, failure: RequestFailedError) -> Response:
        return error_response(failure, self._request_id)

    def whole(self, choices: Sequence[WholeChoice]) -> Json:
        (choice,) = choices
        for text in choice.text:
            self._content.add(self._parser.push(text))
        self._finish()
        return self._head | {"content": self._content.fields(), **self._ending(), "usage": self._usage_fields()}

    def _opening(self) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        message: Json = self._head | {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = self._usage_fields() | {"output_tokens": 0}  # the tokens made so far come with the next events
        return event("message_start", {"message": message | {"usage": usage}})

    def _finish(self) -> bytes:
        return self._content.add(self._parser.finish()) + self._content.close()

    def _ending(self) -> Json:
        (choice,) = self._usage.choices
        return {"stop_reason": self._stop_reason(choice), "stop_sequence": choice.stop_string}

    def _stop_reason(self, choice: Choice) -> str:
        assert choice.end is not None
        if choice.end.reason is FinishReason.LENGTH:
            return "max_tokens" if choice.num_tokens >= self._max_tokens else "model_context_window_exceeded"
        if choice.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if self._parser.has_tool_calls else "end_turn"

    def _usage_fields(self) -> Json:
        """The tokens so far. Those of the prompt that were in the cache are counted apart, as Anthropic's API does."""
        usage = self._usage
        return {
            "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached_tokens,
            "output_tokens": usage.num_output_tokens,
        }

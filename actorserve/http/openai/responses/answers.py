"""The form of answers of ``/v1/responses``: a response object, or the typed events that build it up."""

import time
from collections.abc import Callable, Sequence

from starlette.responses import Response

from actorserve.core.messages import FinishReason
from actorserve.http.answers import sse
from actorserve.http.answers.answer_format import Json, WholeChoice
from actorserve.http.answers.choice import AnswerToken, Choice, Piece
from actorserve.http.answers.usage import Usage
from actorserve.http.chat.deltas import Delta, OutputParser, ReasoningDelta, TextDelta
from actorserve.http.errors import RequestFailedError
from actorserve.http.openai.responses.events import ResponseEvents
from actorserve.http.openai.responses.output import Output
from actorserve.http.openai.responses.tools import OfferedTools


class ResponseFormat:
    """The ``AnswerFormat`` of one response, which has a single choice.

    ``head`` has the fields that do not change, and ``show_tokens`` makes the log-probabilities of tokens.
    """

    def __init__(
        self,
        head: Json,
        usage: Usage,
        tools: OfferedTools,
        parser: OutputParser,
        show_tokens: Callable[[Sequence[AnswerToken]], list[Json]],
    ) -> None:
        self._head = head
        self._usage = usage
        self._events = ResponseEvents()
        self._output = Output(self._events, head["id"].removeprefix("resp_"), tools)
        self._parser = parser
        self._show_tokens = show_tokens
        self._held: list[Json] = []  # log-probabilities of tokens whose text the parser holds back
        self._num_reasoning_tokens = 0
        self._status = "in_progress"
        self._opened = False

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        return self._opening() + self._add(piece, choice.num_tokens)

    def finish(self, choice: Choice) -> bytes:
        assert choice.end is not None
        return self._opening() + self._finish(choice.end.reason)

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE

    def end(self) -> bytes:
        return self._events.event(f"response.{self._status}", {"response": self._response()})

    def fail(self, failure: RequestFailedError) -> bytes:
        opening = self._opening()
        self._status = "failed"
        error = {"code": failure.code, "message": failure.message, "param": failure.param}
        response = self._response() | {"error": {"code": "server_error", "message": failure.message}}
        return b"".join(
            [
                opening,
                self._events.event("error", error),
                self._events.event("response.failed", {"response": response}),
            ]
        )

    def refusal(self, failure: RequestFailedError) -> Response:
        return failure.response()

    def whole(self, choices: Sequence[WholeChoice]) -> Json:
        (choice,) = choices
        for piece, num_tokens in zip(choice.pieces, choice.num_tokens, strict=True):
            self._add(piece, num_tokens)
        self._finish(choice.finish_reason)
        return self._response()

    def _opening(self) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        response = {"response": self._response()}
        return self._events.event("response.created", response) + self._events.event("response.in_progress", response)

    def _add(self, piece: Piece, num_tokens: int) -> bytes:
        """The next text. ``num_tokens`` have been generated so far."""
        self._held += self._show_tokens(piece.tokens)
        return self._write(self._parser.push(piece.text), num_tokens)

    def _finish(self, reason: FinishReason) -> bytes:
        self._status = "completed" if reason is FinishReason.STOP else "incomplete"
        events = self._write(self._parser.finish(), self._usage.num_output_tokens)
        return events + self._output.end(self._status)

    def _write(self, deltas: Sequence[Delta], num_tokens: int) -> bytes:
        """The log-probabilities go to the first text, and nowhere if the tokens were thoughts or a call."""
        events: list[bytes] = []
        for delta in deltas:
            logprobs: list[Json] = []
            if isinstance(delta, TextDelta):
                logprobs, self._held = self._held, []
            elif isinstance(delta, ReasoningDelta):
                self._num_reasoning_tokens = num_tokens
            events.append(self._output.add(delta, logprobs))
        if deltas:
            self._held = []
        return b"".join(events)

    def _response(self) -> Json:
        """The response so far."""
        is_over = self._status != "in_progress"
        is_incomplete = self._status == "incomplete"
        return self._head | {
            "status": self._status,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "output": self._output.items() if is_over else [],
            "usage": self._usage_fields() if is_over else None,
        }

    def _usage_fields(self) -> Json:
        usage = self._usage
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        }

"""The form of an answer, which differs from protocol to protocol, and what the writers give to it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.responses import Response

from actorserve.core.messages import FinishReason, PromptLogprobs
from actorserve.http.answers.choice import AnswerToken, Choice, Piece
from actorserve.http.errors import RequestFailedError

Json = dict[str, Any]


@dataclass(slots=True)
class WholeChoice:
    """A choice of an answer that is not streamed: its pieces so far, and what is known at its end.

    ``num_tokens`` tells for each piece how many tokens the choice had then.
    """

    pieces: list[Piece] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.ERROR
    prompt_logprobs: PromptLogprobs | None = None
    mean_logprob: float = 0.0

    def add(self, piece: Piece, num_tokens: int) -> None:
        self.pieces.append(piece)
        self.num_tokens.append(num_tokens)

    @property
    def text(self) -> list[str]:
        return [piece.text for piece in self.pieces]

    @property
    def tokens(self) -> list[AnswerToken]:
        return [token for piece in self.pieces for token in piece.tokens]

    @property
    def num_logprobs(self) -> int:
        prompt = self.prompt_logprobs
        return sum(piece.num_logprobs for piece in self.pieces) + (len(prompt.logprobs) if prompt is not None else 0)

    def finish(self, choice: Choice) -> None:
        assert choice.end is not None
        self.finish_reason = choice.end.reason
        self.prompt_logprobs = choice.prompt_logprobs
        self.mean_logprob = choice.mean_logprob


class AnswerFormat(Protocol):
    """The form of one answer, streamed or whole. An answer has an object of its own, which may have state.

    The methods for streams return the bytes of events; no bytes if there is nothing to send. ``piece`` and ``finish``
    come in any order of the choices, and ``finish`` is a choice's last. ``end`` or ``fail`` ends the stream.
    """

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """The choice's next text."""
        ...

    def finish(self, choice: Choice) -> bytes:
        """The choice has ended without an error: ``choice.end`` tells how."""
        ...

    def keep_alive(self) -> bytes:
        """A sign of life for a stream that was silent for a while, perhaps before its first text."""
        ...

    def end(self) -> bytes:
        """All choices have ended."""
        ...

    def fail(self, failure: RequestFailedError) -> bytes:
        """A choice has failed in a stream that has begun, so the whole answer fails."""
        ...

    def refusal(self, failure: RequestFailedError) -> Response:
        """A choice has failed before anything was sent."""
        ...

    def whole(self, choices: Sequence[WholeChoice]) -> Json:
        """The answer that is not streamed, ready for JSON. ``choices`` are ordered by index."""
        ...

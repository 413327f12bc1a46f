"""What both endpoints' answers have in common, and the protocol behind which they differ."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actorserve.core.messages import FinishReason
from actorserve.http.choice import AnswerToken, Piece

Json = dict[str, Any]

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no word for."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every chunk of an answer repeats. ``created_s`` is Unix time in whole seconds."""

    answer_id: str
    created_s: int
    model: str
    wants_logprobs: bool


@dataclass(slots=True)
class WholeChoice:
    """A choice of an answer that is sent in one piece: its text and tokens so far."""

    text: list[str] = field(default_factory=list)
    tokens: list[AnswerToken] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.ERROR

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.tokens.extend(piece.tokens)


class AnswerFormat(Protocol):
    """How an endpoint spells an answer: in chunks, or whole. All of it is ready for JSON."""

    def opening(self, index: int) -> Json | None:
        """The chunk with which a choice begins, before there is any text; None where there is no such chunk."""
        ...

    def piece(self, index: int, piece: Piece) -> Json: ...

    def finish(self, index: int, reason: FinishReason) -> Json: ...

    def usage(self, usage: Json) -> Json:
        """The chunk without choices, after all of them."""
        ...

    def whole(self, choices: Sequence[WholeChoice], usage: Json) -> Json: ...


def usage_of(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> Json:
    """Tokens read (of those, how many were in a prefix cache) and made. A prompt counts once for all its choices."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def finite(logprob: float) -> float:
    """The number as JSON can hold it."""
    return max(logprob, LOWEST_LOGPROB)

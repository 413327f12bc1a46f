"""The parts that the answers of both endpoints share, and a protocol for their differences."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actorserve.core.messages import FinishReason
from actorserve.http.answers.choice import AnswerToken, Choice, Piece

Json = dict[str, Any]

LOWEST_LOGPROB = -9999.0
"""Written in place of minus infinity, which JSON cannot express."""


@dataclass(slots=True)
class WholeChoice:
    """A choice of an answer that is not streamed: its text and tokens so far."""

    text: list[str] = field(default_factory=list)
    tokens: list[AnswerToken] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.ERROR

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.tokens.extend(piece.tokens)


class AnswerFormat(Protocol):
    """How an endpoint writes a choice: in the chunks of a stream, or whole. All results are ready for JSON."""

    @property
    def chunk_type(self) -> str:
        """The ``object`` field of a stream's chunks."""
        ...

    @property
    def answer_type(self) -> str:
        """The ``object`` field of an answer that is not streamed."""
        ...

    def opening(self, index: int) -> Json | None:
        """The choice's first chunk, before there is any text. None if the format has no such chunk."""
        ...

    def piece(self, index: int, piece: Piece) -> Json: ...

    def finish(self, index: int, reason: FinishReason) -> Json: ...

    def whole(self, index: int, choice: WholeChoice) -> Json: ...


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields that every chunk of an answer repeats. ``created_s`` is Unix time in whole seconds."""

    answer_id: str
    created_s: int
    model: str

    def fields(self, answer_type: str) -> Json:
        """The head as the first fields of a JSON object of this type."""
        return {"id": self.answer_id, "object": answer_type, "created": self.created_s, "model": self.model}


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts the tokens of an answer. A prompt counts once for all of its choices.

    ``choices`` are ordered by prompt, with ``choices_per_prompt`` for each.
    """

    choices: Sequence[Choice]
    num_prompt_tokens: int
    choices_per_prompt: int

    def fields(self) -> Json:
        """The numbers of tokens so far: of the prompts, of those found in a prefix cache, and of the generated ones."""
        num_output_tokens = sum(choice.num_tokens for choice in self.choices)
        # A prompt's first choice shows what the cache held before. The other choices also find the KV of the first.
        num_cached_tokens = sum(choice.num_cached_tokens for choice in self.choices[:: self.choices_per_prompt])
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": self.num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        }


def finite(logprob: float) -> float:
    """The number as JSON can express it. NaN becomes the lowest log-probability, because NaN > x is false."""
    return max(LOWEST_LOGPROB, logprob)

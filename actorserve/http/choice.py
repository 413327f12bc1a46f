"""One choice of an answer: from its tokens to its text.

Tokens come as they are made, text goes as soon as it is sure: bytes of an unfinished character and the possible
beginning of a stop string are held back. A token belongs to the text that it begins; its log-probability goes out with
that text, so that a stream's pieces, put together, are exactly the answer that is not streamed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from actorserve.core.messages import FinishReason, RefusalReason, SamplingParams, TokenLogprobs
from actorserve.http.detokenizer import Detokenizer
from actorserve.http.service import Ended, Produced
from actorserve.http.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """A token of the answer. ``offset`` is where its text begins in the choice's text, in characters."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Piece:
    """The next text of a choice, and the tokens that begin in it.

    ``num_tokens`` were made so far, held back or not; ``num_cached_tokens`` of the prompt's were in a prefix cache.
    """

    text: str
    tokens: tuple[AnswerToken, ...]
    num_tokens: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a choice, after all of its text."""

    reason: FinishReason
    num_tokens: int
    refusal: RefusalReason | None = None
    retry_after_s: float = 0.0
    num_cached_tokens: int = 0

    @property
    def failed(self) -> bool:
        """Whether the client is owed an error in place of (the rest of) the answer."""
        return self.refusal is not None or self.reason is FinishReason.ERROR


class Choice:
    """Turns one request's stream into text. Knows no I/O: items in, pieces out.

    Nothing may be pushed after a ``Finish`` came out.
    """

    def __init__(self, sampling: SamplingParams, detokenizer: Detokenizer, stop: Sequence[str], index: int = 0) -> None:
        self.index = index
        self.finish: Finish | None = None
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
        self._wants_logprobs = sampling.top_logprobs >= 0
        self._detokenizer = detokenizer
        self._stop_strings = StopStrings(stop) if stop else None
        self._num_tokens = 0
        self._num_cached_tokens = 0
        self._num_decoded_chars = 0
        self._num_sent_chars = 0
        self._held: list[AnswerToken] = []  # their text has not been sent yet
        self._last: AnswerToken | None = None  # a stop token: part of the text only if others follow

    def push(self, item: Produced | Ended) -> list[Piece | Finish]:
        """What the client gets for the stream's next item: at most a piece, then at most the finish."""
        if isinstance(item, Ended):
            return self._end(item)
        self._num_cached_tokens += item.num_cached_tokens
        text = ""
        for row, token_id in enumerate(item.token_ids):
            emitted, stopped = self._decode(token_id, item.logprobs[row] if item.logprobs else None)
            text += emitted
            if stopped:
                return [*self._piece(text), self._finish(FinishReason.STOP)]
        return self._piece(text)

    def _decode(self, token_id: int, logprobs: TokenLogprobs | None) -> tuple[str, bool]:
        """Take one token: the text that is now sure, and whether a stop string ends it."""
        text, stopped = self._flush_last()
        if stopped:
            return text, True
        self._num_tokens += 1
        token = AnswerToken(token_id, self._num_decoded_chars, logprobs)
        if token_id in self._stop_token_ids:
            self._last = token
            return text, False
        more, stopped = self._take(token)
        return text + more, stopped

    def _flush_last(self) -> tuple[str, bool]:
        """A stop token that did not stop the request (``min_tokens``) is text like any other."""
        if self._last is None:
            return "", False
        token, self._last = self._last, None
        return self._take(token)

    def _take(self, token: AnswerToken) -> tuple[str, bool]:
        if self._wants_logprobs:
            self._held.append(token)
        decoded = self._detokenizer.push((token.token_id,))
        self._num_decoded_chars += len(decoded)
        return self._search(decoded)

    def _search(self, decoded: str) -> tuple[str, bool]:
        # Before the minimum a stop string is ordinary text, as a stop token is.
        if self._stop_strings is None or self._num_tokens <= self._min_tokens:
            return decoded, False
        return self._stop_strings.push(decoded)

    def _end(self, ended: Ended) -> list[Piece | Finish]:
        text, stopped = "", False
        if ended.reason is not FinishReason.STOP:
            text, stopped = self._flush_last()
        if not stopped:
            decoded = self._detokenizer.finish()
            self._num_decoded_chars += len(decoded)
            tail, stopped = self._search(decoded)
            text += tail
        if not stopped and self._stop_strings is not None:
            text += self._stop_strings.finish()
        reason = FinishReason.STOP if stopped else ended.reason
        return [*self._piece(text, is_last=not stopped), self._finish(reason, ended.refusal, ended.retry_after_s)]

    def _finish(self, reason: FinishReason, refusal: RefusalReason | None = None, retry_after_s: float = 0.0) -> Finish:
        self.finish = Finish(reason, self._num_tokens, refusal, retry_after_s, self._num_cached_tokens)
        return self.finish

    def _piece(self, text: str, is_last: bool = False) -> list[Piece | Finish]:
        """``text`` with its tokens, or nothing where there is none. The last piece takes tokens without text too."""
        self._num_sent_chars += len(text)
        num_begun = sum(1 for token in self._held if is_last or token.offset < self._num_sent_chars)
        tokens, self._held = tuple(self._held[:num_begun]), self._held[num_begun:]
        return [Piece(text, tokens, self._num_tokens, self._num_cached_tokens)] if text or tokens else []

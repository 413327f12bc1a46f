"""One choice of an answer: from its tokens to its text.

Text goes out as soon as it is certain: bytes of an unfinished character and the possible beginning of a stop string are
held back. A token belongs to the text that it begins, and its log-probability goes out with that text. So a stream's
pieces, put together, are exactly the answer that is not streamed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from actorserve.core.effects import Deliver, End
from actorserve.core.messages import FinishReason, PromptLogprobs, RequestSpec, TokenLogprobs
from actorserve.http.answers.detokenizer import Detokenizer
from actorserve.http.answers.echo import Echo
from actorserve.http.answers.stop_strings import StopStrings
from actorserve.http.chat.deltas import OutputParser


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """A token of the answer. ``offset`` is where its text begins in the choice's text, in characters.

    ``logprobs`` are None if the client wants none, and for a prompt's first token. ``is_echo``: it is one of the
    prompt's tokens, which the answer repeats.
    """

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None
    is_echo: bool = False


class Piece(NamedTuple):
    """The next text of a choice. ``tokens`` begin in it; they are empty if the client wants only the text."""

    text: str
    tokens: tuple[AnswerToken, ...] = ()

    @property
    def num_logprobs(self) -> int:
        """Of its tokens and of the likeliest tokens in their places."""
        return sum(1 + len(token.logprobs.top_logprobs) for token in self.tokens if token.logprobs is not None)


class Choice:
    """Turns the effects on one request into text. Knows no I/O: effects in, pieces out.

    ``num_tokens`` counts the tokens made so far, held back or not, and ``num_cached_tokens`` the prompt's tokens that
    were in a prefix cache. ``kinds`` are the kinds of the workers that made the tokens, in order. ``end`` is set when
    the choice has ended: by its request, by a stop string, or by its parser. The caller must then release the request,
    and drop its further effects.
    """

    def __init__(
        self,
        spec: RequestSpec,
        detokenizer: Detokenizer,
        stop: Sequence[str],
        index: int = 0,
        echo: Echo | None = None,
        first: "Choice | None" = None,
        parser: OutputParser | None = None,
        *,
        wants_token_ids: bool = False,
    ) -> None:
        """With ``echo`` the choice's text begins with the prompt, in which no stop string is searched for.

        ``first`` is the first choice of the same prompt, whose request scores the prompt for all of them; None: this.
        The choice ends when its ``parser`` says that the answer is complete. Its pieces have their tokens if the client
        wants their ids or their log-probabilities.
        """
        self.index = index
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.kinds: list[str] = []
        self.end: End | None = None
        self._stop_token_ids = frozenset(spec.sampling.stop_token_ids)
        self._min_tokens = spec.sampling.min_tokens
        self._wants_logprobs = spec.sampling.top_logprobs >= 0
        self._wants_tokens = wants_token_ids or self._wants_logprobs
        self._detokenizer = detokenizer
        self._stop_strings = StopStrings(stop) if stop else None
        self._spec = spec
        self._echo = echo
        self._first = first or self
        self._parser = parser
        self._prompt_logprobs: PromptLogprobs | None = None
        self._has_begun = False
        self._sum_logprobs = 0.0
        self._num_decoded_chars = 0
        self._num_sent_chars = 0
        self._held: list[AnswerToken] = []  # tokens whose text was not sent yet
        self._stop_token: tuple[int, TokenLogprobs | None] | None = None  # part of the text only if others follow

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Of the prompt's tokens. None if none are wanted, or the prompt's first choice has not begun."""
        return self._first._prompt_logprobs

    @property
    def awaits_prompt(self) -> bool:
        """Whether the choice repeats a prompt whose log-probabilities are not known yet. It takes no effects then."""
        return self._echo is not None and self._wants_logprobs and not (self._first is self or self._first._has_begun)

    @property
    def mean_logprob(self) -> float:
        """The output's log-probability per token; 0 if the request wants no log-probabilities."""
        return self._sum_logprobs / max(1, self.num_tokens)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the choice; None if another reason did."""
        return self._stop_strings.found if self._stop_strings is not None else None

    def push(self, effect: Deliver | End) -> Piece | None:
        """The text that has become certain with this effect. None if there is none."""
        if isinstance(effect, End):
            return self._finish(effect)
        self.num_cached_tokens += effect.num_cached_tokens
        if effect.kind and effect.kind not in self.kinds:
            self.kinds.append(effect.kind)
        if effect.prompt_logprobs is not None:
            self._prompt_logprobs = effect.prompt_logprobs
        self._has_begun = True
        text = ""
        if self._echo is not None:
            echo, self._echo = self._echo, None
            text = self._begin(echo)
            if echo.is_all:
                self.end = End(effect.request_id, FinishReason.LENGTH)
                return self._piece(text, is_last=True)
        for row, token_id in enumerate(effect.token_ids):
            logprobs = effect.logprobs[row] if effect.logprobs else None
            more, stopped = self._decode(token_id, logprobs)
            if logprobs is not None:
                self._sum_logprobs += logprobs.logprob
            text += more
            if stopped:
                self.end = End(effect.request_id, FinishReason.STOP)
                break
        if self._parser is not None and self.end is None:
            self._parser.push(text)
            if self._parser.is_complete:
                self.end = End(effect.request_id, FinishReason.STOP)
        return self._piece(text)

    def _begin(self, echo: Echo) -> str:
        """The prompt's text, whose tokens are the choice's first."""
        self._num_decoded_chars = len(echo.text)
        if self._wants_logprobs:
            entries = self._prompt_entries()
            for index, (token_id, offset) in enumerate(zip(self._spec.prompt_token_ids, echo.offsets, strict=True)):
                known = entries[index - 1] if 0 < index <= len(entries) else None
                self._held.append(AnswerToken(token_id, offset, known, is_echo=True))
        return echo.text

    def _prompt_entries(self) -> list[TokenLogprobs]:
        """What is known of the prompt's tokens, from its second one on, with as many best tokens as for the output."""
        known = self.prompt_logprobs
        if known is None:
            return []
        num_best, width = min(self._spec.sampling.top_logprobs, known.num_best), 1 + known.num_best
        return [
            TokenLogprobs(
                known.logprobs[at],
                known.token_ids[at + 1 : at + 1 + num_best],
                known.logprobs[at + 1 : at + 1 + num_best],
            )
            for at in range(0, len(known.token_ids), width)
        ]

    def _decode(self, token_id: int, logprobs: TokenLogprobs | None) -> tuple[str, bool]:
        """Take one token. Returns the text that is now certain, and whether a stop string ends it."""
        text, stopped = self._flush_stop_token()
        if stopped:
            return text, True
        self.num_tokens += 1
        if token_id in self._stop_token_ids:
            self._stop_token = (token_id, logprobs)
            return text, False
        more, stopped = self._take(token_id, logprobs)
        return text + more, stopped

    def _flush_stop_token(self) -> tuple[str, bool]:
        """A stop token that did not stop the request (``min_tokens``) is text like any other."""
        if self._stop_token is None:
            return "", False
        (token_id, logprobs), self._stop_token = self._stop_token, None
        return self._take(token_id, logprobs)

    def _take(self, token_id: int, logprobs: TokenLogprobs | None) -> tuple[str, bool]:
        if self._wants_tokens:
            self._held.append(AnswerToken(token_id, self._num_decoded_chars, logprobs))
        decoded = self._detokenizer.push(token_id)
        self._num_decoded_chars += len(decoded)
        return self._search(decoded)

    def _search(self, decoded: str) -> tuple[str, bool]:
        # Before ``min_tokens`` a stop string is ordinary text, as a stop token is.
        if self._stop_strings is None or self.num_tokens <= self._min_tokens:
            return decoded, False
        return self._stop_strings.push(decoded)

    def _finish(self, end: End) -> Piece | None:
        """No more tokens come, so the text that was held back is certain now, unless it completes a stop string."""
        text, stopped = "", False
        if end.reason is not FinishReason.STOP:
            text, stopped = self._flush_stop_token()
        if not stopped:
            decoded = self._detokenizer.finish()
            self._num_decoded_chars += len(decoded)
            tail, stopped = self._search(decoded)
            text += tail
        if self._stop_token is not None and self._wants_tokens:
            # The token that ended the request has no text, but counts as one of its tokens.
            self._held.append(AnswerToken(self._stop_token[0], self._num_decoded_chars, self._stop_token[1]))
        if not stopped and self._stop_strings is not None:
            text += self._stop_strings.finish()
        self.end = replace(end, reason=FinishReason.STOP) if stopped else end
        return self._piece(text, is_last=not stopped)

    def _piece(self, text: str, is_last: bool = False) -> Piece | None:
        """``text`` with the tokens that begin in it. The last piece also takes the tokens that have no text."""
        self._num_sent_chars += len(text)
        tokens: tuple[AnswerToken, ...] = ()
        if self._held:
            num_begun = sum(1 for token in self._held if is_last or token.offset < self._num_sent_chars)
            tokens, self._held = tuple(self._held[:num_begun]), self._held[num_begun:]
        return Piece(text, tokens) if text or tokens else None

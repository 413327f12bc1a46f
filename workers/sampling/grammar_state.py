"""How far one request's output has come in its grammar, and which tokens may follow."""

from collections.abc import Iterable
from typing import Final
from zlib import crc32

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from actorserve.core.messages import RequestSpec
from actorserve.model_files.grammars import GrammarError

Words = NDArray[np.uint32]
"""One bit per token: bit ``t % 32`` of word ``t // 32`` says whether token t may be chosen."""

_POSITIONS_PER_MATCHER: Final = 64


class GrammarState:
    """A request's output tokens, and a matcher that has taken some of them.

    llguidance limits a matcher's lexer, which remembers every state that a mask has needed. So that a limit is met at
    the same position wherever the answer was begun, a new matcher starts every 64 output positions, and makes the masks
    of the positions from there on. That bounds a request's memory, too. The request's id shifts these positions,
    because otherwise all requests of a batch that began together would take a new matcher in one step.

    Where the grammar can end, the answer ends with an end-of-sequence token or with one of the request's own stop
    tokens. No stop token comes before ``min_tokens``, and no end of the sequence that the client ignores, unless the
    grammar allows nothing else.
    """

    def __init__(self, request: RequestSpec, compiled: LLMatcher, eos_ids: Iterable[int]) -> None:
        """``compiled``: the grammar's matcher at its start, which is copied."""
        sampling = request.sampling
        self._compiled = compiled
        self._shift = crc32(request.request_id.encode()) % _POSITIONS_PER_MATCHER
        self._tokens = list(request.output_token_ids)
        self._matcher: LLMatcher | None = None
        self._num_taken = 0
        self._has_mask = False
        self._has_ended = False
        self._eos_ids = frozenset(eos_ids)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._ignored_ids = self._eos_ids - self._stop_ids
        self._min_tokens = sampling.min_tokens

    @property
    def num_tokens(self) -> int:
        """How many tokens the request has."""
        return len(self._tokens)

    def append(self, token_id: int) -> None:
        """The request got one more token."""
        self._tokens.append(token_id)

    def fill(self, position: int, words: Words) -> None:
        """Write which tokens may be chosen at this output position, at least one. Tokens from there on are forgotten.

        Raises: GrammarError if the grammar allows no token or has met a limit; ValueError if a token before the
        position is unknown.
        """
        matcher = self._at(position, words)
        if self._has_ended:
            words[:] = 0
            _write(words, self._eos_ids, True)
        else:
            _compute(matcher, words)
        self._has_mask = True
        if _has_any(words, self._eos_ids):
            _write(words, self._stop_ids, True)
        unwelcome = self._ignored_ids | self._stop_ids if position < self._min_tokens else self._ignored_ids
        if _has_any(words, unwelcome):
            others = words.copy()
            _write(others, unwelcome, False)
            if others.any():
                words[:] = others

    def _at(self, position: int, scratch: Words) -> LLMatcher:
        """The matcher after the tokens before ``position``. It may write to ``scratch``."""
        if position > len(self._tokens):
            raise ValueError(f"output position {position} is sampled, but only {len(self._tokens)} tokens are known")
        del self._tokens[position:]
        first = max(0, position - (position + self._shift) % _POSITIONS_PER_MATCHER)
        if self._matcher is None or not first <= self._num_taken <= position:
            self._matcher = self._compiled.deep_copy()
            self._num_taken, self._has_mask, self._has_ended = 0, False, False
        for token_id in self._tokens[self._num_taken :]:
            if not (self._has_mask or self._has_ended or self._num_taken < first):
                _compute(self._matcher, scratch)
            self._take(self._matcher, token_id)
            self._num_taken += 1
            self._has_mask = False
        return self._matcher

    def _take(self, matcher: LLMatcher, token_id: int) -> None:
        if self._has_ended:
            return
        if token_id in self._eos_ids | self._stop_ids and matcher.is_accepting():
            self._has_ended = token_id in self._eos_ids or not matcher.validate_tokens([token_id])
        if not self._has_ended and not matcher.consume_token(token_id):
            raise GrammarError(matcher.get_error())


def _compute(matcher: LLMatcher, words: Words) -> None:
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    if matcher.is_error():
        raise GrammarError(matcher.get_error())


def _has_any(words: Words, token_ids: Iterable[int]) -> bool:
    return any(words[token_id >> 5] >> (token_id & 31) & 1 for token_id in token_ids if token_id >> 5 < len(words))


def _write(words: Words, token_ids: Iterable[int], allowed: bool) -> None:
    for token_id in token_ids:
        if token_id >> 5 < len(words):
            bit = np.uint32(1 << (token_id & 31))
            words[token_id >> 5] = words[token_id >> 5] | bit if allowed else words[token_id >> 5] & ~bit

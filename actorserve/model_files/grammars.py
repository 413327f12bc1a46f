"""Compiling grammars for a model's vocabulary, around the ``llguidance`` library.

The gateway compiles a grammar to check it (``http.structured``), and a worker compiles it again to use it
(``workers.sampling.grammars``). Both use the same limits, so a grammar that the gateway accepts compiles in a worker.
"""

import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from actorserve.errors import ActorserveError
from actorserve.model_files.description import ModelDescription
from actorserve.model_files.tokenizer import Tokenizer, load_tokenizer

_MAX_LEXER_STATES: Final = 10_000  # of one request; a state takes 1 to 2 kB
_MAX_LEXER_FUEL: Final = 50_000  # of one mask, about 4 ms
_MAX_PARSER_ITEMS: Final = 8_000  # of one mask, about 40 ms in the worst grammar of the greatest size
_MAX_GRAMMAR_SIZE: Final = 6_000  # symbols of rules, about 700 properties; the time of an item grows with it
_NUM_TRIED_TOKENS: Final = 48
_MARKER: Final = "\n"
_NUM_FORCED_TOKENS: Final = 4
"""How many of the longest tokens fit into the part of a forced text that is tokenized."""


class GrammarError(ActorserveError):
    """A grammar that cannot be compiled. The text is llguidance's own, and may repeat parts of the grammar."""


class Vocabulary(NamedTuple):
    """What a grammar must know of a model's tokens: the bytes of each, and which of them are control tokens.

    ``tokens[i]`` is empty if token i has no text. ``eos_ids`` are some of the ``special_ids``.
    """

    tokens: Sequence[bytes]
    special_ids: Sequence[int]
    eos_ids: Sequence[int]


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> Vocabulary:
    """The vocabulary of a model with ``vocab_size`` logits, which may be more than the tokenizer's tokens."""
    known_eos = [token_id for token_id in eos_ids if token_id < vocab_size]
    special_ids = sorted(token_id for token_id in {*tokenizer.special_token_ids, *known_eos} if token_id < vocab_size)
    return Vocabulary([tokenizer.token_bytes(token_id) for token_id in range(vocab_size)], special_ids, known_eos)


def compiler_for(description: ModelDescription) -> "GrammarCompiler":
    """A compiler for a described model. It reads the model's tokenizer.

    Raises: ModelError as ``load_tokenizer`` does.
    """
    tokenizer = load_tokenizer(description)
    vocabulary = vocabulary_of(tokenizer, description.config.vocab_size, description.eos_token_ids)
    return GrammarCompiler(vocabulary, partial(tokenizer.encode, add_special_tokens=False))


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], Sequence[int]] | None = None) -> None:
        """``encode``: the tokens that the model's tokenizer makes of a text. Where the grammar allows one text only,
        the model must write it in these tokens. None: in the longest tokens that fit.
        """
        self.vocabulary = vocabulary
        self._encode = encode
        self._limits = LLParserLimits(
            max_lexer_states=_MAX_LEXER_STATES,
            step_lexer_fuel=_MAX_LEXER_FUEL,
            step_max_items=_MAX_PARSER_ITEMS,
            max_grammar_size=_MAX_GRAMMAR_SIZE,
            verbose_errors=False,
        )
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()

    def load(self) -> LLTokenizer:
        """Prepare the vocabulary, which takes a tenth of a second. The first ``compile`` does it otherwise.

        Raises: GrammarError if the model has no end-of-sequence token, because then no answer could end.
        """
        with self._lock:
            if self._tokenizer is None:
                if not self.vocabulary.eos_ids:
                    raise GrammarError("the model has no end-of-sequence token")
                source = cast(TokenizerWrapper, _TokenSource(self.vocabulary, self._encode))
                self._tokenizer = LLTokenizer(source, eos_token=list(self.vocabulary.eos_ids))
            return self._tokenizer

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at the start of the grammar (JSON text). Several threads may copy it at once.

        Raises: GrammarError if the grammar is invalid, or beyond the limits.
        """
        matcher = LLMatcher(self.load(), grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return matcher

    def try_out(self, matcher: LLMatcher) -> None:
        """Write the beginning of an answer that the grammar allows, because many limits are met only there.

        The tokens are chosen by chance, with the same seed each time.

        Raises: GrammarError if a limit is met, or no token may come.
        """
        chance = random.Random(0)
        for _ in range(_NUM_TRIED_TOKENS):
            mask = bytearray(next_mask(matcher))
            for token_id in self.vocabulary.eos_ids:
                mask[token_id >> 3] &= ~(1 << (token_id & 7))
            start = chance.randrange(len(mask))
            rest = mask[start:].lstrip(b"\0") or mask.lstrip(b"\0")
            if not rest:
                return  # only the end of the answer may come
            token_id = 8 * (len(mask) - len(rest)) + chance.choice([bit for bit in range(8) if rest[0] >> bit & 1])
            if not matcher.consume_token(token_id):
                raise GrammarError(matcher.get_error())


class _TokenSource:
    """The attributes that llguidance reads of a tokenizer (``llguidance.TokenizerWrapper``)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], Sequence[int]] | None) -> None:
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = list(vocabulary.special_ids)
        self.eos_token_id = vocabulary.eos_ids[0]
        self._encode = encode
        special = set(vocabulary.special_ids)
        self._ids = {token: i for i, token in enumerate(vocabulary.tokens) if token and i not in special}
        self._max_bytes = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Tokens with exactly the bytes of the text's beginning. Bytes that no token has are left out.

        llguidance asks for the whole text that the grammar forces from here on, once for each mask. It uses only the
        first token, and drops the last ones, up to the length of the longest token, because the text behind them may
        change them. So a longer text would cost time, in each mask, and change nothing.
        """
        text = text[: _NUM_FORCED_TOKENS * self._max_bytes]
        data = text.encode()
        if self._encode is not None:
            # A tokenizer may add a space at the start of a text, so the text is encoded behind a line break.
            for skipped in ("", _MARKER):
                token_ids = self._without(skipped, self._encode(skipped + text))
                if b"".join(self.tokens[token_id] for token_id in token_ids) == data:
                    return token_ids
        return self._longest(data)

    def _without(self, prefix: str, token_ids: Sequence[int]) -> list[int]:
        """The tokens behind those that make up ``prefix``, and perhaps spaces before it."""
        seen = b""
        for index, token_id in enumerate(token_ids):
            if seen.lstrip(b" ") == prefix.encode():
                return list(token_ids[index:])
            seen += self.tokens[token_id]
        return []

    def _longest(self, data: bytes) -> list[int]:
        """The longest token that fits, again and again."""
        token_ids: list[int] = []
        start = 0
        while start < len(data):
            for end in range(min(len(data), start + self._max_bytes), start, -1):
                token_id = self._ids.get(data[start:end])
                if token_id is not None:
                    token_ids.append(token_id)
                    start = end
                    break
            else:
                start += 1
        return token_ids


def next_mask(matcher: LLMatcher) -> bytes:
    """Which tokens may come next: bit ``t % 8`` of byte ``t // 8`` says it of token t.

    Raises: GrammarError if there is none, or the mask is beyond the limits.
    """
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return mask

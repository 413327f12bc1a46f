"""How the fake engine chooses tokens of requests with a grammar."""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from actorserve.model_files.grammars import GrammarCompiler, Vocabulary
from workers.sampling.grammars import Grammars

_CLOSING = (b'"', b"}", b"]")


def compiler_of_bytes(vocab_size: int) -> GrammarCompiler:
    """A compiler for a model without a tokenizer: token i is the byte i modulo 256, and token 0 ends a sequence."""
    return GrammarCompiler(Vocabulary([bytes([token_id % 256]) for token_id in range(vocab_size)], (0,), (0,)))


class FakeChoice:
    """Holds the requests' grammars, and chooses among the tokens that they allow."""

    def __init__(self, load: Callable[[], GrammarCompiler], vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self.grammars = Grammars(lambda: self._compiler, vocab_size, eos_ids)

    def choose(self, allowed: NDArray[np.uint8] | None, number: int) -> int:
        """The token for this random number. ``allowed``: a row of ``Masks.allowed``; None: all tokens.

        Every other choice closes a string, an object or the whole answer, if it can, so that answers are short.
        """
        if allowed is None:
            return number % self._vocab_size
        token_ids = np.flatnonzero(np.unpackbits(allowed, bitorder="little"))
        if number & 1:
            closing = token_ids[self._closes[token_ids]]
            token_ids = closing if len(closing) else token_ids
        return int(token_ids[(number >> 1) % len(token_ids)])

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return self._load()

    @cached_property
    def _closes(self) -> NDArray[np.bool_]:
        vocabulary = self._compiler.vocabulary
        ends = set(vocabulary.eos_ids)
        return np.array([token in _CLOSING or i in ends for i, token in enumerate(vocabulary.tokens)])

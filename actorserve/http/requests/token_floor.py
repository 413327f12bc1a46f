"""A lower bound on the number of a text's tokens, which costs far less than the tokens: a few milliseconds a megabyte.

A text is the concatenation of its tokens' bytes (``Tokenizer.spelled``). So if no token has more than ``m`` letters, a
text with ``k`` letters has at least ``k / m`` tokens. The same holds for other classes of bytes, and for the beginnings
of words; the best of these bounds counts.
"""

import threading
from operator import add, methodcaller
from typing import Final

from actorserve.model_files.tokenizer import Tokenizer

_WHITE: Final = b" \t\n\r"
_LETTERS: Final = bytes(byte for byte in range(128) if chr(byte).isalpha())
_DIGITS: Final = b"0123456789"
_LEADS: Final = ((0xC2, 0xE0), (0xE0, 0xE3), (0xE3, 0xE4), (0xE4, 0xEA), (0xEA, 0xEE), (0xEE, 0xF5))
"""Ranges of first bytes of UTF-8 characters: Latin to Arabic, Indic and symbols, kana, Han, Hangul, and the rest."""
_REST, _CONTINUED = b".", b"_"


def _classes() -> tuple[bytes, bytes]:
    """The class of each byte, for ``bytes.translate``, and all classes."""
    names = [_REST] * 128 + [_CONTINUED] * 128
    groups = [_WHITE, _LETTERS, _DIGITS, *(bytes(range(first, end)) for first, end in _LEADS)]
    for number, group in enumerate(groups):
        for byte in group:
            names[byte] = bytes([ord("A") + number])
    return b"".join(names), bytes(sorted({*b"".join(names)}))


_CLASS_OF, _CLASSES = _classes()
_IN_WORDS: Final = bytes(0x20 if byte in _WHITE else 0x78 for byte in range(256))
_STEP_BYTES: Final = 64 * 1024
"""How much of a text is counted at once. Counting holds Python's lock, so other threads wait for each step."""
_STEP_TOKENS: Final = 2048
"""How much of a vocabulary is counted at once, for the same reason."""


def _counts(data: bytes, before: bytes = b" ") -> list[int]:
    """The number of bytes of each class in ``data``, and of words that begin there. ``before``: the byte before it."""
    classes = data.translate(_CLASS_OF)
    words = (before + data).translate(_IN_WORDS)
    return [*map(classes.count, _CLASSES), words.count(b" x")]


class TokenFloor:
    """The lower bound for one tokenizer. Nothing is certain with a tokenizer whose tokens need not spell a text.

    It reads the whole vocabulary when the first long text comes, which takes some 0.1 s for 50,000 tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._most: list[int] = []  # the greatest of each count in one token
        self._reading = threading.Lock()

    def reaches(self, text: str, limit: int) -> bool:
        """Whether ``text`` certainly has ``limit`` tokens or more. It is read only until that is known.

        Safe to call from several threads.
        """
        data = self._tokenizer.spelled(text)
        if data is None or len(data) < limit:
            return False
        most_of_one = self._most_of_one_token()
        counts = [0] * len(most_of_one)
        for start in range(0, len(data), _STEP_BYTES):
            before = data[start - 1 : start] or b" "
            counts = list(map(add, counts, _counts(data[start : start + _STEP_BYTES], before)))
            if any(count > (limit - 1) * most for count, most in zip(counts, most_of_one, strict=True)):
                return True
        return False

    def _most_of_one_token(self) -> list[int]:
        with self._reading:
            if not self._most:
                self._most = self._read_vocabulary()
            return self._most

    def _read_vocabulary(self) -> list[int]:
        most = [1] * (len(_CLASSES) + 1)
        for start in range(0, self._tokenizer.vocab_size, _STEP_TOKENS):
            end = min(start + _STEP_TOKENS, self._tokenizer.vocab_size)
            tokens = list(map(self._tokenizer.token_bytes, range(start, end)))
            classes = [token.translate(_CLASS_OF) for token in tokens]
            words = [(b" " + token).translate(_IN_WORDS) for token in tokens]
            of_step = [max(map(methodcaller("count", name), classes)) for name in _CLASSES]
            most = list(map(max, most, [*of_step, max(map(methodcaller("count", b" x"), words))]))
        return most

"""What is known of a text's tokens before they are made, for tokenizers whose steps are understood."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from actorserve.model_files.pieces import ByteLevelPieces, Pieces

_SPACE: Final = "\u2581"
_CUT: Final = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_UTF8_BYTES: Final = (*range(0xC0), *range(0xC2, 0xF5))
_PROBES: Final = (("ab", " cd"), ("Ab", " Cd"), ("AB", " CD"), ("ab", " s"), ("I", " ll"), ("a b", " c d"))


class Spelling:
    """How a tokenizer's tokens spell a text. For a tokenizer of another kind, nothing is known.

    ``is_known``: the bytes of a text's tokens, put together, are those of the normalized text. That needs tokens for
    single bytes, and steps that remove nothing from a text.

    ``is_cut_before_words``: a text that is cut between a letter and a space before another letter has the tokens of its
    parts. That holds if the text is split there before it is tokenized, and no added token reaches over the cut.
    """

    def __init__(self, backend: Backend, pieces: Pieces) -> None:
        normalizers, pre_tokenizers = _steps(backend.normalizer), _steps(backend.pre_tokenizer)
        added = backend.get_added_tokens_decoder().values()
        changes_little = all(_adds_spaces_only(step) or step["type"] == "NFC" for step in normalizers)
        missing = _missing_bytes(backend, pieces)
        self.is_known = (
            changes_little
            and not any(_removes(step) for step in pre_tokenizers)
            and (not missing or isinstance(pieces, ByteLevelPieces))
            and not any(token.lstrip or token.rstrip or token.single_word for token in added)
        )
        self.is_cut_before_words = (
            self.is_known
            and not any(_adds_spaces_only(step) for step in normalizers)
            and all(_is_split(backend, left, right) for left, right in _PROBES)
            and not any(" " in token.content for token in added)
        )
        self._marks_spaces = not isinstance(pieces, ByteLevelPieces)  # SentencePiece writes a space as U+2581
        self._dropped = missing
        self._normalizer = backend.normalizer if normalizers and not any(map(_adds_spaces_only, normalizers)) else None

    def spelled(self, text: str) -> bytes:
        """The bytes of the tokens, put together, except for spaces that SentencePiece adds. Only if ``is_known``.

        Tokenizers of the byte-level kind drop a byte that has no token, unless it is part of a longer token; here it is
        always missing.
        """
        if self._normalizer is not None and not text.isascii():
            text = self._normalizer.normalize_str(text.encode("utf-8", "replace").decode("utf-8"))
        if self._marks_spaces:
            text = text.replace(_SPACE, " ")
        return text.encode("utf-8", "replace").translate(None, self._dropped)

    def parts(self, text: str, num_chars: int) -> Iterator[str]:
        """The text in parts of at least ``num_chars``, whose tokens are the text's; the whole if it cannot be cut."""
        begin = 0
        while self.is_cut_before_words and (cut := _CUT.search(text, begin + max(num_chars, 1))) is not None:
            yield text[begin : cut.start()]
            begin = cut.start()
        yield text[begin:]


def _steps(component: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, as their settings."""
    if component is None:
        return []
    state: dict[str, Any] = json.loads(component.__getstate__())
    if state["type"] != "Sequence":
        return [state]
    steps: list[dict[str, Any]] = state.get("normalizers") or state.get("pretokenizers") or []
    return steps


def _adds_spaces_only(step: dict[str, Any]) -> bool:
    """SentencePiece's steps: a space before the text, and U+2581 in place of spaces."""
    if step["type"] == "Prepend":
        return bool(step.get("prepend") == _SPACE)
    return bool(step["type"] == "Replace" and step.get("pattern") == {"String": " "} and step.get("content") == _SPACE)


def _removes(step: dict[str, Any]) -> bool:
    if step["type"] == "Split":
        return bool(step.get("behavior") == "Removed")
    return step["type"] not in ("ByteLevel", "Digits", "Metaspace")


def _missing_bytes(backend: Backend, pieces: Pieces) -> bytes:
    """The bytes of UTF-8 that have no token."""
    names = {byte: pieces.name_of(byte) for byte in _UTF8_BYTES}
    return bytes(byte for byte, name in names.items() if backend.token_to_id(name) is None)


def _is_split(backend: Backend, left: str, right: str) -> bool:
    if backend.pre_tokenizer is None:
        return False
    ends = {end for _, (_, end) in backend.pre_tokenizer.pre_tokenize_str(left + right)}
    return len(left) in ends

"""Text to token ids and back, around the ``tokenizers`` library.

One rule about special tokens: where a prompt's text spells one (``<|im_end|>``), it is that token. Chat templates write
special tokens as text, so rendered chats need it, and completion prompts are read the same way, as other servers do. A
client that must not speak for another role sends token ids.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from actorserve.errors import ModelError
from actorserve.model_files.description import ModelDescription
from actorserve.model_files.gguf_tokenizer import build_tokenizer
from actorserve.model_files.hf_folder import read_json
from actorserve.model_files.pieces import ByteFallbackPieces, ByteLevelPieces, Pieces


class Tokenizer:
    """Encodes and decodes. Safe to use from several threads; deterministic.

    Decoding goes through ``token_bytes``: a text is its tokens' bytes, read as UTF-8, where each longest piece that is
    no valid UTF-8 becomes one U+FFFD. That makes it a concatenation, which streams can follow byte by byte. Where a run
    of byte-fallback tokens is not valid UTF-8 this differs from the library, which then gives the run's characters up.
    """

    def __init__(self, backend: Backend, pieces: Pieces) -> None:
        self._backend = backend
        self._pieces = pieces
        self._bytes: dict[int, bytes] = {}
        self._vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @property
    def vocab_size(self) -> int:
        """Tokens with a text, added ones included; a model's own vocabulary may be padded beyond it."""
        return self._vocab_size

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Control tokens: beginnings and ends, roles. Not part of the text that a client reads."""
        return self._special_ids

    @property
    def strips_leading_space(self) -> bool:
        """Whether encoding puts a space before a text, which decoding takes away again (SentencePiece)."""
        return self._pieces.strips_leading_space

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens spelt in it are taken as such.

        ``add_special_tokens`` puts before it what the model's prompts start with (often bos, often nothing). A rendered
        chat template has its own: encode it without. A lone surrogate is read as a question mark.
        """
        whole = text.encode("utf-8", "replace").decode("utf-8")
        ids: list[int] = self._backend.encode(whole, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids`` from its beginning. Ids without a token give nothing."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in skipped)
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text: perhaps a part of a character. Empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            if token is None:
                return b""
            known = self._bytes[token_id] = self._pieces.to_bytes(token)
        return known

    def token_text(self, token_id: int) -> str:
        """``token_bytes`` as text, with U+FFFD for what is no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary."""
        return self._backend.token_to_id(token)


def load_tokenizer(description: ModelDescription) -> Tokenizer:
    """The tokenizer of a described model.

    Raises: ModelError, when its data is damaged, or of a kind that is not supported.
    """
    if description.format == "gguf":
        backend, path = build_tokenizer(description), description.path
    else:
        path = description.path / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path} does not exist, and text cannot be served without a tokenizer")
        backend = _read_backend(path)
    if backend.get_vocab_size(with_added_tokens=True) == 0:
        raise ModelError(f"{path}: the vocabulary is empty")
    return Tokenizer(backend, _pieces(backend, path))


def _read_backend(path: Path) -> Backend:
    text = json.dumps(read_json(path))
    try:
        backend = Backend.from_str(text)
    except Exception as error:
        # The library raises Exception itself for whatever it cannot read.
        raise ModelError(f"{path}: cannot be read as a tokenizer ({str(error)[:160]})") from error
    # Some files cut or pad every text, as their training wanted; a server may do neither.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _pieces(backend: Backend, path: Path) -> Pieces:
    """How this tokenizer's tokens spell bytes, as its decoder tells."""
    if backend.decoder is None:
        raise ModelError(f"{path}: there is no decoder")
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [str(step["type"]) for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelPieces()
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        spelt_space = steps[0].get("pattern") == {"String": "\u2581"} and steps[0].get("content") == " "
        strip = steps[3] if len(steps) == 4 else {"content": " ", "start": 1, "stop": 0}
        if spelt_space and (strip.get("content"), strip.get("start"), strip.get("stop")) == (" ", 1, 0):
            return ByteFallbackPieces(strips_leading_space=len(steps) == 4)
    shown = ", ".join(kinds)[:120]
    raise ModelError(
        f"{path}: decoder {shown} is not supported; supported: byte-level, and SentencePiece's byte fallback"
    )

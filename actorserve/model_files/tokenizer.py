"""Text to token ids and back, around the ``tokenizers`` library.

The text of a special token in a prompt (``<|im_end|>``) becomes that token. Rendered chats need this, because chat
templates write special tokens as text; a client's text in a chat cannot spell them (``http.chat.control_tokens``).
Completion prompts are the raw interface, as in other servers: their special tokens are read. If a completion's prompt
contains text of others, its client must send token ids.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from actorserve.errors import ModelError
from actorserve.model_files.control_aliases import with_aliases
from actorserve.model_files.description import ModelDescription
from actorserve.model_files.gguf_tokenizer import build_tokenizer
from actorserve.model_files.hf_folder import read_json
from actorserve.model_files.pieces import ByteFallbackPieces, ByteLevelPieces, Pieces
from actorserve.model_files.spelling import Spelling

_PART_CHARS = 16 * 1024
_PROBE = "a"


class Tokenizer:
    """Encodes and decodes. Deterministic, and safe to use from several threads.

    Decoding uses ``token_bytes``: a text is the concatenation of its tokens' bytes, read as UTF-8, so a stream can be
    decoded byte by byte. Each longest invalid sequence becomes one U+FFFD. This differs from the library if a run of
    byte-fallback tokens is not valid UTF-8: the library then drops all characters of the run.
    """

    def __init__(self, backend: Backend, pieces: Pieces) -> None:
        self._backend = backend
        self._pieces = pieces
        self._bytes: dict[int, bytes] = {}
        self._spelling = Spelling(backend, pieces)
        self._vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        plain = self.encode(_PROBE, add_special_tokens=False)
        self._begins_only = self.encode(_PROBE)[-len(plain) :] == plain  # no special token follows a text

    @property
    def vocab_size(self) -> int:
        """The number of tokens with a text, including added tokens. A model's vocabulary may be padded beyond it."""
        return self._vocab_size

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Control tokens: begin, end and role tokens. They are not part of the text that a client reads."""
        return self._special_ids

    def with_control_aliases(self) -> "tuple[Tokenizer, dict[str, str]]":
        """A tokenizer with the same ids, whose control tokens have secret names; and these names by the tokens' texts.

        It reads ``<|im_end|>`` as plain text. Raises: ModelError.
        """
        backend, aliases = with_aliases(self._backend)
        return Tokenizer(backend, self._pieces), aliases

    @property
    def strips_leading_space(self) -> bool:
        """Whether encoding adds a space before a text, and decoding removes it (SentencePiece)."""
        return self._pieces.strips_leading_space

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of ``text``. The text of a special token becomes that token.

        ``add_special_tokens`` adds the tokens that the model's prompts start with (often bos, often none). A rendered
        chat template has them already. A lone surrogate becomes a question mark. Other threads run meanwhile.
        """
        whole = text.encode("utf-8", "replace").decode("utf-8")
        # The library's encode() holds Python's lock, and finds the place of every token, which is not needed here.
        encodings = self._backend.encode_batch_fast([whole], add_special_tokens=add_special_tokens)
        ids: list[int] = encodings[0].ids
        return ids

    def encode_in_parts(self, text: str, *, add_special_tokens: bool = True) -> Iterator[list[int]]:
        """The token ids of ``encode``, in several lists if the text is long, so that a caller may stop early.

        Some tokenizers can only encode a text as a whole; then there is one list.
        """
        parts = self._spelling.parts(text, _PART_CHARS) if self._begins_only else iter([text])
        for part in parts:
            yield self.encode(part, add_special_tokens=add_special_tokens)
            add_special_tokens = False

    def spelled(self, text: str) -> bytes | None:
        """The bytes of the text's tokens, put together, without making the tokens.

        SentencePiece's tokens may spell further spaces. None if this tokenizer's tokens need not spell the text.
        """
        return self._spelling.spelled(text) if self._spelling.is_known else None

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``, which are the beginning of a text. Ids without a token add nothing."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in skipped)
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text, perhaps part of a character. Empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            if token is None:
                return b""
            known = self._bytes[token_id] = self._pieces.to_bytes(token)
        return known

    def token_text(self, token_id: int) -> str:
        """``token_bytes`` as text, with U+FFFD for incomplete characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_name(self, token_id: int) -> str:
        """The token's name in the vocabulary, which may spell bytes in the tokenizer's own way. Empty for an id without
        a token.
        """
        return (self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None) or ""

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        return self._backend.token_to_id(token)


def load_tokenizer(description: ModelDescription) -> Tokenizer:
    """The tokenizer of a described model.

    Raises: ModelError if its data is damaged or of an unsupported kind.
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


def tokenizer_digest(description: ModelDescription) -> str:
    """A hex digest of what the described model's tokenizer is made of; empty if the model has no tokenizer.

    Raises: ModelError if its file cannot be read.
    """
    if description.format == "gguf":
        facts = sorted(description.tokenizer_metadata.items())
        return hashlib.sha256(repr(facts).encode("utf-8", "replace")).hexdigest()
    path = description.path / "tokenizer.json"
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None


def _read_backend(path: Path) -> Backend:
    text = json.dumps(read_json(path))
    try:
        backend = Backend.from_str(text)
    except Exception as error:
        # The library raises plain Exception for any error.
        raise ModelError(f"{path}: cannot be read as a tokenizer ({str(error)[:160]})") from error
    # Some files configure truncation or padding, for training. A server must do neither.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _pieces(backend: Backend, path: Path) -> Pieces:
    """How this tokenizer's tokens encode bytes, according to its decoder."""
    if backend.decoder is None:
        raise ModelError(f"{path}: the decoder is missing")
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [str(step["type"]) for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelPieces()
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        replaces_space = steps[0].get("pattern") == {"String": "\u2581"} and steps[0].get("content") == " "
        strip = steps[3] if len(steps) == 4 else {"content": " ", "start": 1, "stop": 0}
        if replaces_space and (strip.get("content"), strip.get("start"), strip.get("stop")) == (" ", 1, 0):
            return ByteFallbackPieces(strips_leading_space=len(steps) == 4)
    shown = ", ".join(kinds)[:120]
    raise ModelError(
        f"{path}: decoder {shown} is not supported; supported: byte-level, and SentencePiece's byte fallback"
    )

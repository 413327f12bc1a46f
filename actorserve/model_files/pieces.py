"""How a vocabulary's tokens encode bytes. A token adds the same bytes to any text, whatever its neighbours."""

import re
from typing import Protocol

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Pieces(Protocol):
    """The encoding of bytes in one vocabulary."""

    @property
    def strips_leading_space(self) -> bool:
        """Whether the tokenizer adds a space before a text, so that decoding removes it."""
        ...

    def name_of(self, byte: int) -> str:
        """The token that stands for a single byte. A vocabulary may lack it."""
        ...

    def to_bytes(self, token: str) -> bytes:
        """The bytes that ``token`` stands for; they may be part of a UTF-8 character."""
        ...


class ByteLevelPieces:
    """GPT-2's encoding: each byte is a printable character (Radford et al. 2019, ``bytes_to_unicode``)."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        self._byte_of = {chr(byte): byte for byte in printable}
        self._byte_of |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
        self._names = {byte: name for name, byte in self._byte_of.items()}

    @property
    def strips_leading_space(self) -> bool:
        return False

    def name_of(self, byte: int) -> str:
        return self._names[byte]

    def to_bytes(self, token: str) -> bytes:
        try:
            return bytes([self._byte_of[character] for character in token])
        except KeyError:  # the bytes of an added token are its own text
            return token.encode("utf-8")


class ByteFallbackPieces:
    """SentencePiece's encoding: U+2581 is a space, ``<0xE4>`` a byte, and other characters stand for themselves."""

    def __init__(self, *, strips_leading_space: bool) -> None:
        self._strips_leading_space = strips_leading_space

    @property
    def strips_leading_space(self) -> bool:
        return self._strips_leading_space

    def name_of(self, byte: int) -> str:
        return f"<0x{byte:02X}>"

    def to_bytes(self, token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte:
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode("utf-8")

"""Journals: a core's inputs with their times and senders. A new core that gets the same inputs has the same effects.

Records are msgpack lists, each preceded by its length in four big-endian bytes:

- ``[recipe]``, first: the recipe of the core, as JSON (``wire.recipes``);
- ``[now, sender name, sender incarnation, message]`` (nil for no sender): an input, written before the core sees it;
- ``[digest]``: the digest of this input's effects.

If a crash has cut off the last record, the whole records before it can be read.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, BinaryIO, Final

import msgpack

from actorserve.core.effects import Effect
from actorserve.core.messages import Message, Peer
from actorserve.errors import ProtocolError
from actorserve.wire.codec import MAX_FRAME_BYTES, decode, encode

_LENGTH: Final = struct.Struct(">I")
_MAX_RECORD_BYTES: Final = MAX_FRAME_BYTES + 4096
_DIGEST_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One input of a core: ``now`` in seconds of the recording process's clock."""

    now: float
    sender: Peer | None
    message: Message


Record = str | Entry | bytes
"""A recipe, an input, or the digest of its effects."""


def write_recipe(file: BinaryIO, recipe: str) -> None:
    """Begin a journal; ``recipe`` is JSON."""
    _write(file, (recipe,))


def write_entry(file: BinaryIO, entry: Entry) -> None:
    """Append ``entry``; the caller decides when to flush."""
    name, incarnation = entry.sender if entry.sender is not None else (None, None)
    _write(file, (entry.now, name, incarnation, encode(entry.message)))


def write_effects(file: BinaryIO, effects: Sequence[Effect]) -> None:
    """Append the digest of the last input's effects."""
    _write(file, (digest(effects),))


def digest(effects: Sequence[Effect]) -> bytes:
    """A digest of the effects. Equal effects have equal digests, and different effects practically always differ."""
    return blake2b(msgpack.packb(effects, default=_plain), digest_size=_DIGEST_BYTES).digest()


def _plain(value: Any) -> list[Any]:
    """An effect, or a message in it, as a list for msgpack. All other parts are numbers, strings or tuples already."""
    names: tuple[str, ...] = value.__slots__
    return [type(value).__name__, *(getattr(value, name) for name in names)]


def read_records(file: BinaryIO) -> Iterator[Record]:
    """All records, in order.

    Raises: ProtocolError if the file is no such log.
    """
    while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        if length > _MAX_RECORD_BYTES:
            raise ProtocolError("log record too large")
        body = file.read(length)
        if len(body) < length:
            return
        yield _parse(body)


def read_entries(file: BinaryIO) -> Iterator[Entry]:
    """The inputs alone, in order.

    Raises: ProtocolError if the file is no such log.
    """
    return (record for record in read_records(file) if isinstance(record, Entry))


def _write(file: BinaryIO, values: tuple[object, ...]) -> None:
    body: bytes = msgpack.packb(values)
    file.write(_LENGTH.pack(len(body)) + body)


def _parse(body: bytes) -> Record:
    try:
        values = msgpack.unpackb(body, raw=False, strict_map_key=True, max_array_len=4, max_map_len=0, max_ext_len=0)
    except (ValueError, RecursionError, msgpack.UnpackException):
        raise ProtocolError("log record is not msgpack within bounds") from None
    match values:
        case [float(now), None, None, bytes(frame)]:
            return Entry(now, None, decode(frame, local=True))
        case [float(now), str(name), int(incarnation), bytes(frame)]:
            return Entry(now, Peer(name, incarnation), decode(frame, local=True))
        case [str(recipe)]:
            return recipe
        case [bytes(value)]:
            return value
    raise ProtocolError("log record has another form")

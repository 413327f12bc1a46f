"""A recorded log: what a core was told, when, and by whom. Replayed into a fresh core it gives the same effects.

One entry is msgpack ``[now, sender name, sender incarnation, message]`` (nil for no sender), preceded by its length in
four big-endian bytes. A log cut off in mid-entry, as a crash leaves it, reads up to the last whole entry.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

import msgpack

from actorserve.core.messages import Message, Peer
from actorserve.errors import ProtocolError
from actorserve.wire.codec import MAX_FRAME_BYTES, decode, encode

_LENGTH: Final = struct.Struct(">I")
_MAX_ENTRY_BYTES: Final = MAX_FRAME_BYTES + 4096


@dataclass(frozen=True, slots=True)
class Entry:
    """One input of a core: ``now`` in seconds of the recording process's clock."""

    now: float
    sender: Peer | None
    message: Message


def write_entry(file: BinaryIO, entry: Entry) -> None:
    """Append ``entry``; the caller decides when to flush."""
    name, incarnation = entry.sender if entry.sender is not None else (None, None)
    body: bytes = msgpack.packb((entry.now, name, incarnation, encode(entry.message)))
    file.write(_LENGTH.pack(len(body)) + body)


def read_entries(file: BinaryIO) -> Iterator[Entry]:
    """The entries in order.

    Raises: ProtocolError where the file is not such a log.
    """
    while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        if length > _MAX_ENTRY_BYTES:
            raise ProtocolError("log entry too large")
        body = file.read(length)
        if len(body) < length:
            return
        yield _parse(body)


def _parse(body: bytes) -> Entry:
    try:
        values = msgpack.unpackb(body, raw=False, strict_map_key=True, max_array_len=4, max_map_len=0, max_ext_len=0)
    except (ValueError, RecursionError, msgpack.UnpackException):
        raise ProtocolError("log entry is not msgpack within bounds") from None
    match values:
        case [float(now), None, None, bytes(frame)]:
            return Entry(now, None, decode(frame, local=True))
        case [float(now), str(name), int(incarnation), bytes(frame)]:
            return Entry(now, Peer(name, incarnation), decode(frame, local=True))
    raise ProtocolError("log entry has another form")

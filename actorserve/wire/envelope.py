"""The envelope of every frame: the sender's and the target's names and incarnations.

A frame is one part: ``b"ASV1"``, the head's length in two big-endian bytes, the head (msgpack ``[sender name, sender
incarnation, target name, target incarnation]``), then the message. A link's head never changes, so a sender makes it
once and a receiver looks it up by its bytes.

A bundle is a frame of several messages, which costs one encryption, one look at its key and one system call. It begins
with ``b"ASB1"``, and the length of each message, in four big-endian bytes, precedes it. Only peers that say so in their
Hello (``takes_bundles``) get bundles.
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgpack

from actorserve.core.messages import Peer
from actorserve.errors import ProtocolError
from actorserve.wire.schema import INT64_MAX

ANY_INCARNATION: Final = 0
"""The target's incarnation if it is unknown. Only Hello may use it."""

MAX_BUNDLE_BYTES: Final = 2**16
MAX_BUNDLE_MESSAGES: Final = 256

_PREFIX: Final = struct.Struct(">4sH")
_LENGTH: Final = struct.Struct(">I")
_MAGIC: Final = b"ASV1"
_BUNDLE_MAGIC: Final = b"ASB1"
_MAX_HEAD_BYTES: Final = 1024
_MAX_KNOWN_HEADS: Final = 4096


class Addressed(NamedTuple):
    """A parsed head. The message begins at ``body_at``."""

    sender: Peer
    target: Peer
    body_at: int


def make_head(sender: Peer, target: Peer) -> bytes:
    """The envelope of all messages from ``sender`` to ``target``.

    Raises: ValueError if the names are too long.
    """
    head: bytes = msgpack.packb((*sender, *target))
    if len(head) > _MAX_HEAD_BYTES:
        raise ValueError("peer names are too long")
    return _PREFIX.pack(_MAGIC, len(head)) + head


def num_bytes_in_bundle(message: bytes) -> int:
    """How many bytes of a bundle an encoded message takes."""
    return _LENGTH.size + len(message)


def make_bundle(head: bytes, messages: Sequence[bytes]) -> bytes:
    """The frame of several encoded messages, of which ``head`` would be the envelope of one."""
    parts = [part for message in messages for part in (_LENGTH.pack(len(message)), message)]
    return b"".join((_BUNDLE_MAGIC, head[len(_MAGIC) :], *parts))


def messages_in(frame: bytes, body_at: int) -> list[memoryview]:
    """The encoded messages in a frame, whose envelope ends at ``body_at``.

    Raises: ProtocolError if it is a bundle that is cut off, or has too many messages.
    """
    content = memoryview(frame)
    if not frame.startswith(_BUNDLE_MAGIC):
        return [content[body_at:]]
    messages: list[memoryview] = []
    at, end = body_at, len(frame)
    while at < end:
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(frame, at)[0] if begin <= end else begin
        if at > end:
            raise ProtocolError("bundle is cut off")
        if len(messages) == MAX_BUNDLE_MESSAGES:
            raise ProtocolError("bundle has too many messages")
        messages.append(content[begin:at])
    return messages


class HeadReader:
    """Parses heads, and caches a bounded number of them."""

    def __init__(self) -> None:
        self._known: dict[bytes, Addressed] = {}

    def read(self, frame: bytes) -> Addressed:
        """The sender and target of ``frame``. Raises: ProtocolError if it has no envelope of ours."""
        if len(frame) < _PREFIX.size:
            raise ProtocolError("frame has no envelope")
        magic, length = _PREFIX.unpack_from(frame)
        if magic not in (_MAGIC, _BUNDLE_MAGIC):
            raise ProtocolError("frame has no envelope")
        body_at = _PREFIX.size + length
        if length > _MAX_HEAD_BYTES or body_at > len(frame):
            raise ProtocolError("envelope is cut off")
        head = frame[_PREFIX.size : body_at]
        known = self._known.get(head)
        if known is None:
            if len(self._known) >= _MAX_KNOWN_HEADS:
                self._known.clear()
            known = self._known[head] = _parse(head, body_at)
        return known


def _parse(head: bytes, body_at: int) -> Addressed:
    try:
        values = msgpack.unpackb(head, raw=False, strict_map_key=True, max_array_len=4, max_map_len=0, max_ext_len=0)
    except (ValueError, RecursionError, msgpack.UnpackException):
        raise ProtocolError("envelope is malformed") from None
    match values:
        case [str(sender), int(sender_life), str(target), int(target_life)] if (
            sender
            and target
            and type(sender_life) is int
            and type(target_life) is int
            and 0 < sender_life <= INT64_MAX
            and 0 <= target_life <= INT64_MAX
        ):
            return Addressed(Peer(sender, sender_life), Peer(target, target_life), body_at)
    raise ProtocolError("envelope is malformed")

"""The frames on the data sockets. A connection serves one read, and ends with it:

    reader -> source   a sign (8 bytes) and the number of bytes that follow (4 bytes); then msgpack of (kind, number,
                       stage, on_host, blocks, secret, num_skipped, per_chunk, with_checksum); and (step_id,
                       by_layer) in addition if the ticket names an iteration
    source -> reader   either b"X" and the number of bytes that follow (4 bytes); then the reason of a refusal
                       or b"P" or b"B" and four zeros; then chunks of ``per_chunk`` blocks, the last one shorter

A chunk has the order of the source's memory: each piece of all blocks after another (b"P"), or block by block (b"B").
Layer by layer there are as many chunks for each layer, with that layer's pieces alone.
With checksums the crc32 of each chunk comes before it (4 bytes). The sockets' buffers bound the bytes in flight, and a
reader that reads at a limited rate lets them fill up.
"""

import struct
from dataclasses import dataclass
from typing import Any

import msgpack

from actorserve.core.messages import KVTicket, TransferId, TransferKind
from actorserve.errors import ProtocolError

BLOCK_NUMBER_BYTES = 9  # the most that a block's number takes in msgpack
REQUEST_BYTES = 1024  # the most that a request takes without its block numbers

REQUEST_HEAD = struct.Struct("!8sI")
ANSWER_HEAD = struct.Struct("!sI")
CHECKSUM = struct.Struct("!I")

_SIGN = b"AKVREAD1"
_BY_PIECE, _BY_BLOCK, _REFUSED = b"P", b"B", b"X"
_MAX_REASON_BYTES = 500
_U64 = 2**64
_KINDS = [kind.value for kind in TransferKind]


@dataclass(frozen=True, slots=True)
class Read:
    """Asks for the ticket's blocks except the first ``num_skipped``, in chunks of ``per_chunk`` blocks."""

    ticket: KVTicket
    num_skipped: int
    per_chunk: int
    with_checksum: bool


@dataclass(frozen=True, slots=True)
class Granted:
    by_piece: bool


@dataclass(frozen=True, slots=True)
class Refused:
    reason_bytes: int


def encode_read(read: Read) -> bytes:
    ticket = read.ticket
    fields = (
        *(*ticket.transfer, ticket.stage, ticket.on_host, ticket.blocks, ticket.secret),
        *(read.num_skipped, read.per_chunk, read.with_checksum),
        *((ticket.step_id, ticket.by_layer) if ticket.step_id else ()),
    )
    body: bytes = msgpack.packb(fields)
    return REQUEST_HEAD.pack(_SIGN, len(body)) + body


def encode_granted(*, by_piece: bool) -> bytes:
    return ANSWER_HEAD.pack(_BY_PIECE if by_piece else _BY_BLOCK, 0)


def encode_refused(reason: str) -> bytes:
    text = reason.encode()[:_MAX_REASON_BYTES]
    return ANSWER_HEAD.pack(_REFUSED, len(text)) + text


def request_bytes(head: bytes, most: int) -> int:
    """The number of bytes of the request after ``head``. Raises: ProtocolError."""
    sign, length = REQUEST_HEAD.unpack(head)
    if sign != _SIGN:
        raise ProtocolError("not a request for KV")
    if length > most:
        raise ProtocolError("the request is too long")
    return int(length)


def decode_answer(head: bytes) -> Granted | Refused:
    """Raises: ProtocolError."""
    kind, length = ANSWER_HEAD.unpack(head)
    if kind in (_BY_PIECE, _BY_BLOCK) and length == 0:
        return Granted(kind == _BY_PIECE)
    if kind == _REFUSED and length <= _MAX_REASON_BYTES:
        return Refused(length)
    raise ProtocolError("neither KV nor a refusal")


def decode_read(body: bytes) -> Read:
    """Decode a request without its head. Raises: ProtocolError."""
    try:
        fields = msgpack.unpackb(body, use_list=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the request is not msgpack: {type(error).__name__}") from None
    if not isinstance(fields, tuple) or len(fields) not in (9, 11):
        raise ProtocolError("the request has the wrong number of fields")
    kind, number, stage, on_host, blocks, secret, num_skipped, per_chunk, with_checksum = fields[:9]
    step_id, by_layer = fields[9:] or (0, False)
    if not (
        kind in _KINDS
        and all(_is_count(count) for count in (number, stage, num_skipped, per_chunk, step_id))
        and type(by_layer) is bool
        and type(on_host) is bool
        and type(with_checksum) is bool
        and isinstance(secret, str)
        and isinstance(blocks, tuple)
        and all(_is_count(block) for block in blocks)
        and per_chunk > 0
    ):
        raise ProtocolError("the request has a field of a wrong type or range")
    transfer = TransferId(TransferKind(kind), number)
    ticket = KVTicket(transfer, stage, on_host, blocks, secret, step_id, by_layer)
    return Read(ticket, num_skipped, per_chunk, with_checksum)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _U64

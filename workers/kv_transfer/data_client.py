"""The destination's side of KV between hosts: asks for blocks, and writes them into the pool as they arrive."""

import socket
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from actorserve.core.messages import KVTicket
from actorserve.errors import ProtocolError
from workers.kv.layer_progress import PATIENCE_S
from workers.kv.pools import HostBlocks, KVPools
from workers.kv_transfer.cancellation import Cancellation
from workers.kv_transfer.errors import TransferError
from workers.kv_transfer.frames import ANSWER_HEAD, CHECKSUM, Read, Refused, decode_answer, encode_read
from workers.kv_transfer.links import Pace
from workers.kv_transfer.pacing import LEAST_BYTES_PER_S
from workers.kv_transfer.parts import parts_of
from workers.kv_transfer.streams import connecting, move_in, regions, wait_at_most
from workers.kv_transfer.tickets import CHUNK_BYTES


class DataClient:
    """A ``Link`` to the ``DataServer`` at ``address``, with one connection for each read.

    A source that sends nothing for ``patience_s`` counts as gone. ``with_checksum``: the crc32 of each chunk is checked
    before the chunk is written. One thread at a time may use it.
    """

    def __init__(self, address: str, pools: KVPools, patience_s: float, *, with_checksum: bool) -> None:
        self._address = address
        self._pools = pools
        self._patience_s = patience_s
        self._with_checksum = with_checksum

    def close(self) -> None:
        """Nothing to release: no connection outlives a read."""

    def read(
        self,
        ticket: KVTicket,
        num_skipped: int,
        blocks: Sequence[int],
        pace: Pace,
        cancellation: Cancellation,
        *,
        into_host: bool = False,
    ) -> None:
        try:
            stream, connect = connecting(self._address)
            with stream, cancellation.ends(stream):
                self._read(stream, connect, ticket, num_skipped, blocks, pace, into_host)
        except (OSError, ValueError) as error:
            cancellation.check()  # a cancel ends waits with an OSError
            if isinstance(error, TimeoutError):
                raise TransferError(f"the source of the KV sent nothing for {self._patience_s:g} s") from None
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise TransferError(f"KV cannot be read from {self._address[:80]!r}: {reason}") from None

    def _read(
        self,
        stream: socket.socket,
        connect: Callable[[], None],
        ticket: KVTicket,
        num_skipped: int,
        blocks: Sequence[int],
        pace: Pace,
        into_host: bool,
    ) -> None:
        per_chunk = max(1, CHUNK_BYTES // self._pools.block_bytes)
        stream.settimeout(self._patience_s)
        connect()
        read = Read(ticket, num_skipped, per_chunk, self._with_checksum)
        stream.sendall(encode_read(read))
        wait_at_most(stream, self._patience_s)
        by_piece = self._granted(stream)
        if ticket.step_id:
            wait_at_most(stream, self._patience_s + PATIENCE_S)
        self._take(stream, by_piece, read, blocks, pace, into_host)

    def _within_s(self, ticket: KVTicket, num_bytes: int) -> float:
        """The longest time that a chunk of ``num_bytes`` may take."""
        waiting_s = PATIENCE_S if ticket.step_id else 0.0
        return self._patience_s + waiting_s + num_bytes / LEAST_BYTES_PER_S

    def _granted(self, stream: socket.socket) -> bool:
        """Read the source's answer. Returns whether chunks come piece by piece. Raises: TransferError for a refusal."""
        try:
            answer = decode_answer(_receive(stream, ANSWER_HEAD.size))
        except ProtocolError as error:
            raise TransferError(f"the source of the KV sent {error}") from None
        if isinstance(answer, Refused):
            text = _receive(stream, answer.reason_bytes).decode(errors="replace")
            raise TransferError(f"the source of the KV refused: {' '.join(text.split())}")
        return answer.by_piece

    def _take(
        self,
        stream: socket.socket,
        by_piece: bool,
        read: Read,
        blocks: Sequence[int],
        pace: Pace,
        into_host: bool,
    ) -> None:
        pool, (num_pieces, piece_bytes) = self._pools.pool(on_host=into_host), self._pools.shape
        staging = None
        if self._with_checksum or not isinstance(pool, HostBlocks):
            staging = np.empty(min(read.per_chunk, len(blocks)) * self._pools.block_bytes, dtype=np.uint8)
        for part in parts_of(read.ticket, read.num_skipped, read.per_chunk, num_pieces, self._pools.num_layers):
            chunk, num_bytes = blocks[part.begin : part.end], part.num_bytes(piece_bytes)
            pieces, within_s = part.num_pieces, self._within_s(read.ticket, num_bytes)
            pace(num_bytes)
            if staging is None:
                assert isinstance(pool, HostBlocks)
                move_in(stream, regions(pool.array[:, part.pieces], chunk, by_piece=by_piece), within_s)
                continue
            crc32 = CHECKSUM.unpack(_receive(stream, CHECKSUM.size))[0] if self._with_checksum else None
            body = staging[:num_bytes]
            move_in(stream, regions(body.reshape(1, 1, num_bytes), (0,), by_piece=False), within_s)
            if crc32 is not None and zlib.crc32(body.data) != crc32:
                raise TransferError("KV arrived damaged: its checksum is wrong")
            shape = (pieces, len(chunk), piece_bytes) if by_piece else (len(chunk), pieces, piece_bytes)
            arrived = body.reshape(shape)
            arrived = arrived.transpose(1, 0, 2) if by_piece else arrived
            pool.write(chunk, arrived, range(len(chunk)), part.pieces)


def _receive(stream: socket.socket, num_bytes: int) -> bytes:
    """Raises: OSError."""
    body = np.empty(num_bytes, dtype=np.uint8)
    if num_bytes:
        move_in(stream, regions(body.reshape(1, 1, num_bytes), (0,), by_piece=False))
    return body.tobytes()

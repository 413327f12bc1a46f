"""The destination's side of KV between hosts with keys (``server``)."""

import contextlib
import time
from collections.abc import Sequence

import numpy as np
import zmq

from actorserve.core.messages import KVTicket
from actorserve.errors import ProtocolError
from actorserve.wire.curve.sockets import FRAME_OVERHEAD, connect_with_curve
from actorserve.wire.trust import Trust
from workers.kv.layer_progress import PATIENCE_S
from workers.kv.pools import BlockMemory, KVPools
from workers.kv_transfer.cancellation import Cancellation
from workers.kv_transfer.curve.server import MAX_AHEAD, NEXT, NO_MORE
from workers.kv_transfer.errors import TransferError
from workers.kv_transfer.frames import ANSWER_HEAD, Read, Refused, decode_answer, encode_read
from workers.kv_transfer.links import Pace
from workers.kv_transfer.pacing import LEAST_BYTES_PER_S
from workers.kv_transfer.parts import parts_of
from workers.kv_transfer.tickets import CHUNK_BYTES

_LOOK_MS = 50  # how often a reader that waits looks whether it is cancelled
_LINGER_MS = 100  # how long a close lets the last message leave
_MAX_ANSWER_BYTES = 4096


class CurveClient:
    """A ``Link`` to the ``CurveServer`` of the process called ``source`` at ``address``, over one connection.

    A source that sends nothing for ``patience_s`` counts as gone. One thread at a time may use it.

    Raises: TransferError if ``trust`` knows no key of the source's host.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        source: str,
        address: str,
        pools: KVPools,
        patience_s: float,
        trust: Trust,
    ) -> None:
        self._source = source
        self._pools = pools
        self._patience_s = patience_s
        self._trust = trust
        self._per_chunk = max(1, CHUNK_BYTES // pools.block_bytes)
        key = trust.key_of_process(source)
        if key is None:
            raise TransferError(f"the cluster has no key of the host of {source[:80]!r}")
        self._server_key = key
        try:
            self._socket = context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.IPV6, "[" in address)
            most = max(_MAX_ANSWER_BYTES, self._per_chunk * pools.block_bytes)
            self._socket.setsockopt(zmq.MAXMSGSIZE, most + FRAME_OVERHEAD)
            connect_with_curve(self._socket, trust.own, key)
            self._socket.connect(address)
        except zmq.ZMQError as error:
            raise TransferError(f"KV cannot be read from {address[:80]!r}: {error.strerror}") from None

    def close(self) -> None:
        self._socket.close(_LINGER_MS)

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
        if self._trust.key_of_process(self._source) != self._server_key:
            raise TransferError(f"the key of the host of {self._source} is not accepted any more")
        self._send(encode_read(Read(ticket, num_skipped, self._per_chunk, with_checksum=False)), cancellation)
        try:
            self._check_granted(self._receive(0, cancellation))
            self._take(ticket, num_skipped, blocks, pace, cancellation, self._pools.pool(on_host=into_host))
        except TransferError:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send(NO_MORE, zmq.NOBLOCK)
            raise

    def _take(
        self,
        ticket: KVTicket,
        num_skipped: int,
        blocks: Sequence[int],
        pace: Pace,
        cancellation: Cancellation,
        pool: BlockMemory,
    ) -> None:
        """Ask for the chunks, and write them as they arrive."""
        num_pieces, piece_bytes = self._pools.shape
        parts = list(parts_of(ticket, num_skipped, self._per_chunk, num_pieces, self._pools.num_layers))
        num_asked, waiting_s = 0, PATIENCE_S if ticket.step_id else 0.0
        for number, part in enumerate(parts):
            while num_asked < min(len(parts), number + MAX_AHEAD):
                pace(parts[num_asked].num_bytes(piece_bytes))
                self._send(NEXT, cancellation)
                num_asked += 1
            chunk, num_bytes = blocks[part.begin : part.end], part.num_bytes(piece_bytes)
            body = np.frombuffer(self._receive(num_bytes, cancellation, waiting_s).buffer, dtype=np.uint8)
            if len(body) != num_bytes:
                raise TransferError(f"the source of the KV sent {len(body)} bytes in place of {num_bytes}")
            pool.write(chunk, body.reshape(len(chunk), -1, piece_bytes), range(len(chunk)), part.pieces)

    def _send(self, body: bytes, cancellation: Cancellation) -> None:
        """Raises: TransferError, also if ZeroMQ has given the connection up for good, because the source refused it."""
        self._wait(zmq.POLLOUT, self._patience_s, cancellation)
        self._socket.send(body, zmq.NOBLOCK)

    def _receive(self, num_bytes: int, cancellation: Cancellation, waiting_s: float = 0.0) -> zmq.Frame:
        """The next frame, of about ``num_bytes``, for which the source may wait so long. Raises: TransferError."""
        self._wait(zmq.POLLIN, self._patience_s + waiting_s + num_bytes / LEAST_BYTES_PER_S, cancellation)
        frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        if len(frames) != 1:
            raise TransferError("the source of the KV sent a message of several frames")
        return frames[0]

    def _wait(self, event: int, within_s: float, cancellation: Cancellation) -> None:
        until_s = time.monotonic() + within_s
        while not self._socket.poll(_LOOK_MS, event):
            cancellation.check()
            if time.monotonic() > until_s:
                raise TransferError(f"the source of the KV sent nothing for {self._patience_s:g} s")
        cancellation.check()

    @staticmethod
    def _check_granted(frame: zmq.Frame) -> None:
        """Raises: TransferError for a refusal."""
        head, rest = frame.bytes[: ANSWER_HEAD.size], frame.bytes[ANSWER_HEAD.size :]
        try:
            if len(head) < ANSWER_HEAD.size:
                raise ProtocolError("neither KV nor a refusal")
            answer = decode_answer(head)
        except ProtocolError as error:
            raise TransferError(f"the source of the KV sent {error}") from None
        if isinstance(answer, Refused):
            text = rest[: answer.reason_bytes].decode(errors="replace")
            raise TransferError(f"the source of the KV refused: {' '.join(text.split())}")

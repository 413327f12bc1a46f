"""The source's side of KV between hosts: serves blocks to readers that show a ticket for them.

It uses stream sockets and not ZeroMQ, because then the kernel reads blocks directly from one pool and writes them
directly into the other. ZeroMQ needs each message in one piece, which both sides would have to copy.
Over TCP within a host of two cores, 64 MiB in blocks of 180 pieces took 40 to 47 ms of CPU time (2.5 to 3.1 GB/s), and
57 to 69 ms by ZeroMQ (1.9 to 2.2 GB/s).

Each connection has a thread of its own, so a slow or stopped reader delays no other reader. Whatever bytes
arrive, the server answers or counts them, and continues to serve.
"""

import contextlib
import logging
import socket
import threading
import time
import zlib
from collections import Counter
from functools import partial

import numpy as np

from actorserve.errors import ActorserveError, ProtocolError
from workers.kv.layer_progress import PATIENCE_S, StuckError, wait_until
from workers.kv.pools import HostBlocks, KVPools
from workers.kv_transfer.frames import (
    CHECKSUM,
    REQUEST_HEAD,
    Read,
    decode_read,
    encode_granted,
    encode_refused,
    request_bytes,
)
from workers.kv_transfer.parts import Part, parts_of
from workers.kv_transfer.streams import has_hung_up, listen, move_out, path_of, regions, remove_path, wait_at_most
from workers.kv_transfer.tickets import Tickets

_MAX_READERS = 64
_REQUEST_S = 5.0  # the time that a request may take to arrive
_SILENCE_S = 60.0  # a reader that takes nothing for so long is dropped
_FULL_PAUSE_S = 0.05

_log = logging.getLogger(__name__)


class DataServer:
    """Serves blocks of ``pools`` at ``address`` until ``close``. For a TCP ``bind``, ``announced_host`` is the host in
    ``address``.

    ``dropped`` counts requests that were not served, by reason.

    Raises: ActorserveError if ``bind`` cannot be bound, or names no address that other workers can reach.
    """

    def __init__(
        self,
        pools: KVPools,
        bind: str,
        ticket_key: bytes,
        *,
        announced_host: str = "",
        request_s: float = _REQUEST_S,
        silence_s: float = _SILENCE_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self._pools = pools
        self._tickets = Tickets(pools, ticket_key)
        self._request_s, self._silence_s, self._patience_s = request_s, silence_s, patience_s
        self._lock = threading.Lock()  # guards the following fields, and ``dropped``
        self._is_closed = False
        self._readers: dict[socket.socket, threading.Thread] = {}
        try:
            self._listener, self.address = listen(bind, announced_host)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ActorserveError(f"cannot serve KV at {bind}: {reason}") from None
        self._path = path_of(bind)
        self._thread = threading.Thread(target=self._accept, name="kv server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Returns when all threads have ended, which is soon."""
        with self._lock:
            self._is_closed = True
            readers = list(self._readers.values())
            for stream in self._readers:
                _shut(stream)
        _shut(self._listener)
        self._thread.join()
        for thread in readers:
            thread.join()
        self._listener.close()
        if self._path is not None:
            remove_path(self._path)

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                self._drop("no connection could be accepted")  # too many open files, or the reader has hung up
                time.sleep(_FULL_PAUSE_S)
                continue
            thread = threading.Thread(target=self._serve, args=(stream,), name="kv reader", daemon=True)
            with self._lock:
                is_taken = not self._is_closed and len(self._readers) < _MAX_READERS
                if is_taken:
                    self._readers[stream] = thread
                    thread.start()
            if not is_taken:
                self._drop("too many readers at once")
                stream.setblocking(False)
                _send_what_fits(stream, encode_refused("too many readers at once"))
                stream.close()

    def _serve(self, stream: socket.socket) -> None:
        try:
            self._answer(stream)
        except (ProtocolError, StuckError) as error:
            self._drop(str(error))
        except (TimeoutError, BlockingIOError):
            self._drop("the reader stalled")
        except OSError:
            self._drop("the reader hung up")
        finally:
            with self._lock:  # so that close() shuts down no closed socket, whose number may be in use again
                del self._readers[stream]
                stream.close()

    def _answer(self, stream: socket.socket) -> None:
        until = time.monotonic() + self._request_s
        head = _receive(stream, REQUEST_HEAD.size, until)
        read = decode_read(_receive(stream, request_bytes(head, self._tickets.max_request_bytes), until))
        wait_at_most(stream, self._silence_s)
        reason = self._tickets.refusal(read)
        if reason is not None:
            self._drop(reason)
            stream.sendall(encode_refused(reason))
            return
        self._send_blocks(stream, read)

    def _send_blocks(self, stream: socket.socket, read: Read) -> None:
        pool = self._pools.pool(on_host=read.ticket.on_host)
        blocks, (num_pieces, piece_bytes) = read.ticket.blocks[read.num_skipped :], self._pools.shape
        parts = parts_of(read.ticket, read.num_skipped, read.per_chunk, num_pieces, self._pools.num_layers)
        if isinstance(pool, HostBlocks) and not read.with_checksum:
            by_piece = not read.ticket.on_host
            stream.sendall(encode_granted(by_piece=by_piece))
            for part in parts:
                self._wait_for(part, stream)
                chunk = blocks[part.begin : part.end]
                move_out(stream, regions(pool.array[:, part.pieces], chunk, by_piece=by_piece))
            return
        stream.sendall(encode_granted(by_piece=False))
        staging = np.empty(min(len(blocks), read.per_chunk) * self._pools.block_bytes, dtype=np.uint8)
        for part in parts:
            self._wait_for(part, stream)
            chunk = blocks[part.begin : part.end]
            body = staging[: part.num_bytes(piece_bytes)].reshape(len(chunk), -1, piece_bytes)
            pool.read(chunk, body, part.pieces)
            if read.with_checksum:
                stream.sendall(CHECKSUM.pack(zlib.crc32(body.data)))
            move_out(stream, regions(body, range(len(body)), by_piece=False))

    def _wait_for(self, part: Part, stream: socket.socket) -> None:
        """Return when the iteration that writes this part has written it. Raises: StuckError, OSError."""
        if part.least and self._pools.progress is not None:
            wait_until(self._pools.progress, part.least, partial(self._check_open, stream), self._patience_s)

    def _check_open(self, stream: socket.socket) -> None:
        if self._is_closed:
            raise ConnectionAbortedError("the server is closed")
        if has_hung_up(stream):
            raise ConnectionResetError("the reader hung up")

    def _drop(self, reason: str) -> None:
        with self._lock:
            self.dropped[reason] += 1
            is_first = self.dropped[reason] == 1 and not self._is_closed
        if is_first:
            _log.warning("KV server: %s (logged once; counted from here on)", reason)


def _receive(stream: socket.socket, num_bytes: int, until: float) -> bytes:
    """Receive ``num_bytes`` by ``until`` (monotonic clock). Raises: OSError; ProtocolError if the reader hangs up."""
    body = bytearray()
    while len(body) < num_bytes:
        stream.settimeout(max(0.001, until - time.monotonic()))
        part = stream.recv(num_bytes - len(body))
        if not part:
            raise ProtocolError("the request is incomplete")
        body += part
    return bytes(body)


def _send_what_fits(stream: socket.socket, body: bytes) -> None:
    with contextlib.suppress(OSError):
        stream.send(body)


def _shut(stream: socket.socket) -> None:
    """Shut the socket down, which wakes threads that wait for it."""
    with contextlib.suppress(OSError):  # not connected any more
        stream.shutdown(socket.SHUT_RDWR)

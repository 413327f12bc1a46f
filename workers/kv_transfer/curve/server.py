"""The source's side of KV between hosts with keys: encrypted ZeroMQ sockets in place of ``data_server``'s streams.

A connection serves one read after another. A message is one frame, which CURVE guards against changes:

    reader -> source   a request, as in ``frames``; b"N" for the next chunk; or b"S" if it wants no more
    source -> reader   an answer, as in ``frames``; then a chunk for each b"N", block by block

The reader asks for a few chunks ahead, so the source keeps no more than these in memory for it. A chunk that an
iteration still writes is sent when that has written it. A message counts only if its key belongs to a host with workers
at that moment.
"""

import logging
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import zmq

from actorserve.errors import ActorserveError, ProtocolError
from actorserve.wire.curve.handshakes import FAILED, described, failures_of
from actorserve.wire.curve.sockets import FRAME_OVERHEAD, serve_with_curve
from actorserve.wire.curve.zap import zap_answer, zap_socket
from actorserve.wire.refusals import Refusals
from actorserve.wire.trust import Trust
from workers.kv.pools import KVPools
from workers.kv_transfer.frames import REQUEST_HEAD, Read, decode_read, encode_granted, encode_refused, request_bytes
from workers.kv_transfer.parts import Part, parts_of
from workers.kv_transfer.streams import tcp_place
from workers.kv_transfer.tickets import Tickets

NEXT = b"N"
NO_MORE = b"S"
MAX_AHEAD = 4
"""How many chunks a reader may ask for ahead of those that it has."""

_MAX_READERS = 64
_SILENCE_S = 60.0  # a reader that asks for nothing for so long is forgotten
_BATCH = 64
_SWEEP_MS = 1000
_LOOK_MS = 1  # how often the progress of iterations is looked at while a reader waits for it
_SNDHWM = 4 * MAX_AHEAD

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Reading:
    """One reader's read with its key: the parts that were not sent yet, of which it has asked for the first
    ``num_asked``.
    """

    key: str
    read: Read
    parts: deque[Part]
    asked_at: float
    num_asked: int = 0

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.read.ticket.blocks[self.read.num_skipped :]


class CurveServer:
    """Serves blocks of ``pools`` at a TCP ``bind`` until ``close``, to the hosts that ``trust`` knows.
    ``announced_host`` is the host in ``address``.

    ``dropped`` counts what was not served, by reason.

    Raises: ActorserveError if ``bind`` cannot be bound, or names no address that other workers can reach.
    """

    def __init__(
        self, pools: KVPools, bind: str, ticket_key: bytes, trust: Trust, *, announced_host: str = "", name: str = "KV"
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self._pools = pools
        self._trust = trust
        self._tickets = Tickets(pools, ticket_key)
        self._refusals = Refusals(name, self.dropped, time.monotonic)
        self._readings: OrderedDict[bytes, _Reading] = OrderedDict()  # by routing id, the latest used last
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zap = zap_socket(self._context)
        self._router = self._context.socket(zmq.ROUTER)
        serve_with_curve(self._router, trust.own)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, _SNDHWM)
        self._router.setsockopt(zmq.RCVHWM, _BATCH)
        self._router.setsockopt(zmq.MAXMSGSIZE, self._tickets.max_request_bytes + REQUEST_HEAD.size + FRAME_OVERHEAD)
        try:
            self.address = self._bind(bind, announced_host)
        except (zmq.ZMQError, ValueError) as error:
            self._release()
            reason = error.strerror if isinstance(error, zmq.ZMQError) else error
            raise ActorserveError(f"cannot serve KV at {bind}: {reason}") from None
        self._failures = failures_of(self._router)
        self._waking, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, name="kv server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Returns when the thread has ended, which is soon. Closing again does nothing."""
        if self._thread.is_alive():
            os.write(self._wake, b"\0")
            self._thread.join()
            os.close(self._wake)
            os.close(self._waking)

    def _bind(self, bind: str, announced_host: str) -> str:
        host, port = tcp_place(bind)
        shown = announced_host or host
        if shown in ("*", "0.0.0.0", "::"):
            raise ValueError("other workers cannot connect to this address: expected a host to announce")
        self._router.setsockopt(zmq.IPV6, ":" in host)
        self._router.bind(f"tcp://{_in_url(host)}:{port or '*'}")
        taken = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        return f"tcp://{_in_url(shown)}:{taken}"

    def _release(self) -> None:
        self._router.close(0)
        self._zap.close(0)
        self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._zap, self._router, self._failures, self._waking):
            poller.register(socket, zmq.POLLIN)
        while True:
            waiting = [reader for reader, reading in self._readings.items() if reading.num_asked]
            ready = dict(poller.poll(_LOOK_MS if waiting else _SWEEP_MS))
            if self._waking in ready:
                break
            if self._zap in ready:
                self._drain(self._zap, self._answer_zap)
            if self._failures in ready:
                self._drain(self._failures, self._count_failure)
            if self._router in ready:
                self._serve()
            for reader in waiting:
                self._send_asked(reader)
            self._sweep()
        self._router.disable_monitor()
        self._failures.close(0)
        self._release()

    @staticmethod
    def _drain(socket: "zmq.Socket[bytes]", handle: Callable[[list[bytes]], None]) -> None:
        for _ in range(_BATCH):
            try:
                handle(socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return

    def _answer_zap(self, question: list[bytes]) -> None:
        self._zap.send_multipart(zap_answer(question, self._trust, self._refusals))

    def _count_failure(self, message: list[bytes]) -> None:
        failure = described(message)
        if failure is not None:
            self._refusals.refuse(FAILED, "", f"a connection: {failure}")

    def _serve(self) -> None:
        for _ in range(_BATCH):
            try:
                routing_id, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            reader = bytes(routing_id.buffer)
            key = str(routing_id.get("User-Id"))
            if not self._trust.may_read_kv(key):
                self._refusals.refuse("key of no host with workers", key, "a read of KV")
                self._readings.pop(reader, None)
            elif len(frames) != 1:
                self._drop("a message of several frames")
            else:
                self._take(reader, key, frames[0].bytes)

    def _take(self, reader: bytes, key: str, body: bytes) -> None:
        """Handle the message of a reader with this key."""
        if body == NEXT:
            reading = self._readings.get(reader)
            if reading is not None:
                reading.num_asked += 1
                reading.asked_at = time.monotonic()
                self._readings.move_to_end(reader)
                self._send_asked(reader)
            return
        self._readings.pop(reader, None)
        if body == NO_MORE:
            return
        try:
            head = body[: REQUEST_HEAD.size]
            if len(head) < REQUEST_HEAD.size:
                raise ProtocolError("the request is incomplete")
            rest = body[REQUEST_HEAD.size :]
            if request_bytes(head, self._tickets.max_request_bytes) != len(rest):
                raise ProtocolError("the request has another length than it says")
            read = decode_read(rest)
        except ProtocolError as error:
            self._drop(str(error))
            return
        reason = "too many readers at once" if len(self._readings) >= _MAX_READERS else self._tickets.refusal(read)
        if reason is not None:
            self._drop(reason)
            self._router.send_multipart([reader, encode_refused(reason)], zmq.NOBLOCK)
            return
        num_pieces, _ = self._pools.shape
        parts = parts_of(read.ticket, read.num_skipped, read.per_chunk, num_pieces, self._pools.num_layers)
        self._readings[reader] = _Reading(key, read, deque(parts), time.monotonic())
        self._router.send_multipart([reader, encode_granted(by_piece=False)], zmq.NOBLOCK)

    def _send_asked(self, reader: bytes) -> None:
        """Send the chunks that this reader has asked for, as far as iterations have written them."""
        reading, progress = self._readings.get(reader), self._pools.progress
        done = 0 if progress is None else progress.value
        while reading is not None and reading.parts and reading.num_asked and reading.parts[0].least <= done:
            if not self._trust.may_read_kv(reading.key):
                del self._readings[reader]
                return
            reading.num_asked -= 1
            self._send_chunk(reader, reading)
        if reading is not None and not reading.parts:
            del self._readings[reader]

    def _send_chunk(self, reader: bytes, reading: _Reading) -> None:
        """A reader that is gone, or that asked for more than it takes, loses the chunk: ZeroMQ drops it."""
        part = reading.parts.popleft()
        chunk, (_, piece_bytes) = reading.blocks[part.begin : part.end], self._pools.shape
        body = np.empty(part.num_bytes(piece_bytes), dtype=np.uint8)
        pool = self._pools.pool(on_host=reading.read.ticket.on_host)
        pool.read(chunk, body.reshape(len(chunk), -1, piece_bytes), part.pieces)
        self._router.send_multipart([reader, body.data], zmq.NOBLOCK, copy=False)

    def _sweep(self) -> None:
        """Forget readers that ask for nothing any more."""
        until = time.monotonic() - _SILENCE_S
        while self._readings and next(iter(self._readings.values())).asked_at < until:
            self._readings.popitem(last=False)
            self._drop("the reader stalled")

    def _drop(self, reason: str) -> None:
        self.dropped[reason] += 1
        if self.dropped[reason] == 1:
            _log.warning("KV server: %s (logged once; counted from here on)", reason)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host

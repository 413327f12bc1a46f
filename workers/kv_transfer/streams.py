"""Stream sockets that carry KV: addresses, and moves of bytes between a socket and many pieces of memory at once.

The pieces of a block lie apart in the pool. The kernel gathers and scatters them (writev, readv), so that this process
copies nothing.
"""

import contextlib
import ctypes
import errno
import math
import os
import re
import select
import socket
import stat
import struct
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from workers.kv.pools import Bytes

Regions = NDArray[np.uint64]
"""[any, 2]: address and number of bytes of each region, like the kernel's ``struct iovec``."""

_MAX_REGIONS = 1024  # at most, in one system call: IOV_MAX
_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\[\]:/]+):(\d{1,5}|\*)", re.ASCII)
_BACKLOG = 128

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.readv, _libc.writev):
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    _call.restype = ctypes.c_ssize_t


def tcp_place(address: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``; port ``*`` gives 0. Raises: ValueError."""
    found = _TCP.fullmatch(address)
    if found is None:
        raise ValueError("expected ipc://path or tcp://host:port")
    host, port = found.groups()
    number = 0 if port == "*" else int(port)
    if number > 65535:
        raise ValueError("no port is above 65535")
    return host.strip("[]"), number


def path_of(address: str) -> str | None:
    """The path in ``ipc://path``; None for other addresses. Raises: ValueError if the path is empty."""
    if not address.startswith("ipc://"):
        return None
    if address == "ipc://":
        raise ValueError("expected ipc://path or tcp://host:port")
    return address.removeprefix("ipc://")


def listen(bind: str, announced_host: str) -> tuple[socket.socket, str]:
    """A socket that listens at ``bind``, and the address at which others reach it.

    Raises: OSError; ValueError if ``bind`` is no address, or no address that others can reach.
    """
    path = path_of(bind)
    if path is not None:
        return _listen_at_path(path), bind
    host, port = tcp_place(bind)
    name = announced_host or host
    if name in ("*", "0.0.0.0", "::"):
        raise ValueError("other workers cannot connect to this address: expected a host to announce")
    if host == "*":
        host = "0.0.0.0"
    listener = socket.create_server((host, port), family=_family(host), backlog=_BACKLOG)
    shown = f"[{name}]" if ":" in name else name
    return listener, f"tcp://{shown}:{listener.getsockname()[1]}"


def _listen_at_path(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        remove_path(path)  # left by an earlier process that was killed
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def remove_path(path: str) -> None:
    """Remove the path if it is a socket's. Otherwise do nothing; a later bind reports the problem."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def connecting(address: str) -> tuple[socket.socket, Callable[[], None]]:
    """A socket, and a function that connects it to ``address`` within its timeout. Raises: OSError, ValueError."""
    path = path_of(address)
    if path is not None:
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        return plain, lambda: plain.connect(path)
    host, port = tcp_place(address)
    family, kind, number, _, place = socket.getaddrinfo(host, port, _family(host), socket.SOCK_STREAM)[0]
    stream = socket.socket(family, kind, number)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream, lambda: stream.connect(place)


def wait_at_most(stream: socket.socket, seconds: float) -> None:
    """Let the kernel end each wait for the peer after ``seconds``, in ``move_in`` and ``move_out``."""
    stream.settimeout(None)
    whole = int(seconds)
    limit = struct.pack("@ll", whole, max(1, int((seconds - whole) * 1e6)))
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def has_hung_up(stream: socket.socket) -> bool:
    """Whether the other side has closed the connection. Never waits."""
    poller = select.poll()
    poller.register(stream, select.POLLRDHUP)
    return bool(poller.poll(0))


def regions(array: Bytes, blocks: Sequence[int], *, by_piece: bool) -> Regions:
    """Where ``blocks`` lie in ``array``, [num_blocks, pieces, bytes of a piece]: piece by piece, or block by block.
    Regions that lie side by side are joined.

    The caller makes sure that ``blocks`` lie within the array, and keeps the array alive.
    """
    per_block, per_piece, per_byte = array.strides
    _, pieces, piece_bytes = array.shape
    if per_byte != 1:
        raise ValueError("the bytes of a piece lie apart")
    at_blocks = array.ctypes.data + np.asarray(blocks, dtype=np.int64) * per_block
    at_pieces = np.arange(pieces, dtype=np.int64) * per_piece
    outer, inner = (at_pieces, at_blocks) if by_piece else (at_blocks, at_pieces)
    firsts = np.flatnonzero(np.diff(inner, prepend=inner[0] - 2 * piece_bytes) != piece_bytes)
    found: Regions = np.empty((len(outer), len(firsts), 2), dtype=np.uint64)
    found[:, :, 0] = outer[:, None] + inner[firsts]
    found[:, :, 1] = np.diff(firsts, append=len(inner)) * piece_bytes
    return found.reshape(-1, 2)


def move_in(stream: socket.socket, into: Regions, within_s: float = math.inf) -> None:
    """Fill the regions, in order, from the stream, all ``within_s`` seconds.

    Raises: OSError; TimeoutError if one wait or the whole took too long.
    """
    _move(_libc.readv, stream, into, within_s)


def move_out(stream: socket.socket, out_of: Regions, within_s: float = math.inf) -> None:
    """Send the regions' bytes, in order. Raises: as ``move_in``."""
    _move(_libc.writev, stream, out_of, within_s)


def _move(call: Callable[[int, int, int], int], stream: socket.socket, over: Regions, within_s: float) -> None:
    """Call ``readv`` or ``writev`` until all regions are done. Overwrites ``over``."""
    until_s = time.monotonic() + within_s
    ends = np.cumsum(over[:, 1], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    num_moved = at = 0
    while num_moved < total:
        moved = call(stream.fileno(), over[at:].ctypes.data, min(_MAX_REGIONS, len(over) - at))
        if moved == 0:
            raise ConnectionResetError("the other side hung up")
        if moved < 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:
                continue
            if number == errno.EAGAIN:
                raise TimeoutError(number, os.strerror(number))
            raise OSError(number, os.strerror(number))
        num_moved += moved
        if num_moved < total and time.monotonic() > until_s:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))  # data comes, but too slowly
        at = int(np.searchsorted(ends, num_moved, side="right"))
        if num_moved < total:
            left = int(ends[at]) - num_moved
            over[at] = int(over[at, 0] + over[at, 1]) - left, left

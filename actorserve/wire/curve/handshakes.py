"""The handshakes that ZeroMQ itself refuses, because the other process has no key, or a wrong one of ours.

Such a process cannot even show its own key. ZeroMQ drops its connection without asking the ZAP handler, so a monitor of
the listening socket tells of it.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

FAILED: Final = "failed handshake"
"""The reason under which such connections are counted."""

_BATCH: Final = 256
_FAILURES: Final = zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL


class HandshakeMonitor:
    """Tells of each connection to a listening socket that fails before ZeroMQ has seen its key.

    Construct and close it on the thread of a running event loop, and close it before the socket.
    """

    NUM_SOCKETS: Final = 2  # ours, and one that ZeroMQ opens

    def __init__(self, socket: "zmq.Socket[bytes]", on_failure: Callable[[str], None]) -> None:
        self._watched = socket
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._socket = failures_of(socket)
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._read)
        self._loop.call_soon(self._read)  # the descriptor signals nothing before a first read has found nothing

    def close(self) -> None:
        """Watch no more. Closing again does nothing."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._watched.disable_monitor()
            self._socket.close(0)

    def _read(self) -> None:
        """Read the events that have arrived. The descriptor is edge-triggered, so none may be left unread."""
        for _ in range(_BATCH):
            if self._socket.closed:
                return
            try:
                failure = described(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if failure is not None:
                self._on_failure(failure)
        self._loop.call_soon(self._read)


def failures_of(socket: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
    """A socket from which the handshakes that fail at ``socket`` are read, until ``socket`` disables its monitor."""
    endpoint = f"inproc://handshakes-{id(socket)}"
    socket.monitor(endpoint, _FAILURES)
    reading: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    reading.setsockopt(zmq.LINGER, 0)
    # Without a limit, because ZeroMQ's own thread would wait for us while the queue is full.
    reading.setsockopt(zmq.RCVHWM, 0)
    reading.connect(endpoint)
    return reading


def described(message: list[bytes]) -> str | None:
    """What a message of ``failures_of`` says; None for the last one, after which none comes."""
    parsed = parse_monitor_message(message)
    event, value = parsed["event"], parsed["value"]
    if not event & _FAILURES:
        return None
    if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
        return f"no key, or not for this process's key (ZeroMQ's protocol error {value:#x})"
    return f"the connection ended before it showed a key (error {value})"

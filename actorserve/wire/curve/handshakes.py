"""The handshakes that ZeroMQ itself refuses, because the other process has no key, or a wrong one of ours.

Such a process cannot even show its own key. ZeroMQ drops its connection without asking the ZAP handler, so a monitor of
the listening socket tells of it.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

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
        endpoint = f"inproc://handshakes-{id(self)}"
        socket.monitor(endpoint, _FAILURES)
        self._socket = socket.context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Without a limit, because ZeroMQ's own thread would wait for us while the queue is full.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(endpoint)
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
                event = parse_monitor_message(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] & _FAILURES:  # the last event says that the monitor has stopped
                self._on_failure(_described(event["event"], event["value"]))
        self._loop.call_soon(self._read)


def _described(event: int, value: int) -> str:
    if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
        return f"no key, or not for this process's key (ZeroMQ's protocol error {value:#x})"
    return f"the connection ended before it showed a key (error {value})"

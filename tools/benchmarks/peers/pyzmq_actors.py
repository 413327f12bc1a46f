"""Two processes with bare ZeroMQ: blocking sockets, msgpack, no checks. Run with a folder."""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import zmq

from actorserve.processes.status import PARENT_PID, attach
from tools.benchmarks.peers.calls import INSTANCE, Processes, request_id, serve, time_each, windows

_PLACE, _PLACED = 10, 11
_ANSWER = "answer"
_START_TIMEOUT_MS = 10_000


class PyzmqCaller:
    """Implements ``calls.Caller`` with a DEALER; a ROUTER answers."""

    def __init__(self, folder: str) -> None:
        address = f"ipc://{Path(folder) / 'router'}"
        self._other = subprocess.Popen(
            [sys.executable, "-P", "-m", "tools.benchmarks.peers.pyzmq_actors", _ANSWER, address],
            stdin=subprocess.DEVNULL,
            env={**os.environ, PARENT_PID: str(os.getpid())},
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(address)
        self._socket.setsockopt(zmq.RCVTIMEO, _START_TIMEOUT_MS)
        try:
            self._call(0)
        except zmq.Again:
            self.close()
            raise OSError("the other process does not answer") from None

    def one_at_a_time(self, num_calls: int) -> list[float]:
        return time_each(self._call, num_calls)

    def pipelined(self, num_calls: int, window: int) -> float:
        began = time.perf_counter()
        for count in windows(num_calls, window):
            for number in range(count):
                self._send(number)
            for _ in range(count):
                self._receive()
        return time.perf_counter() - began

    def processes(self) -> Processes:
        pair = os.getpid(), self._other.pid
        return Processes(pair, pair)

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._other.kill()
        self._other.wait()

    def _call(self, number: int) -> None:
        self._send(number)
        self._receive()

    def _send(self, number: int) -> None:
        self._socket.send(msgpack.packb((_PLACE, request_id(number), 1, 512, 0, "", None, 0.0)))

    def _receive(self) -> None:
        msgpack.unpackb(self._socket.recv())


def _answer(address: str) -> None:
    attach()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(address)
    while True:
        sender, frame = router.recv_multipart()
        _, request_id, epoch, *_ = msgpack.unpackb(frame)
        router.send_multipart((sender, msgpack.packb((_PLACED, request_id, epoch, INSTANCE, 0.0))))


if __name__ == "__main__":
    if sys.argv[1] == _ANSWER:
        _answer(sys.argv[2])
    sys.exit(serve(PyzmqCaller, (OSError,)))

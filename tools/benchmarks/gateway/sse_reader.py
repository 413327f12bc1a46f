"""Opens many streams at a server and counts their events. Run by ``tools/bench gateway``, in a process of its own.

It reads bare sockets with epoll, and searches the bytes for the tokens' texts, so that it costs less than the server.
``argv[1]`` holds its ``Options`` as JSON. Each line of stdin is a command: ``{"open": n}`` opens n streams and answers
when each has had an event; ``{"measure": seconds}`` answers with a ``Measured``; ``{"close": true}`` closes them.
"""

import json
import re
import resource
import selectors
import socket
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from actorserve.sim.statistics import percentile
from tools.benchmarks.common.processes import cpu_s
from tools.benchmarks.gateway.step_clock import StepClock

_READ_BYTES: Final = 256 * 1024
_SILENCE_S: Final = 60.0  # a busy machine may take longer to open all streams, but not to open the next one
_OPENING_AT_ONCE: Final = 64  # the others wait, as clients do that arrive over some time
_TEXT: Final = re.compile(rb'"text":"([^"\\]+)"')


@dataclass(frozen=True, slots=True)
class Options:
    """``body`` is the JSON of the request. The CPU times of ``process_ids`` are measured."""

    port: int
    body: str
    texts: Sequence[str]
    clock_file: str
    process_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Measured:
    """Latencies are from a step's token to its event. CPU times are those of the server and of this reader."""

    seconds: float
    num_events: int
    num_streams: int
    cpu_s: float
    reader_cpu_s: float
    p50_s: float | None
    p99_s: float | None
    max_s: float | None


class _Stream:
    """One connection, and what is left of its last read: an event that has not arrived whole."""

    __slots__ = ("num_events", "rest", "socket")

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.rest = b""
        self.num_events = 0


class Reader:
    def __init__(self, options: Options) -> None:
        self._options = options
        self._clock = StepClock(Path(options.clock_file))
        self._number = {text.encode(): number for number, text in enumerate(options.texts)}
        self._selector = selectors.DefaultSelector()
        self._latencies_s = array("d")
        self._num_ended = 0

    def open(self, num: int) -> dict[str, Any]:
        """Open ``num`` more streams, and read until each has had an event, or for a minute no further one had any."""
        until_s = time.monotonic() + _SILENCE_S
        body = self._options.body.encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}"
        waiting: list[_Stream] = []
        num_opened = 0
        while (num_opened < num or waiting) and time.monotonic() < until_s:
            while num_opened < num and len(waiting) < _OPENING_AT_ONCE:
                connection = socket.create_connection(("127.0.0.1", self._options.port))
                connection.sendall(head.encode() + b"\r\n\r\n" + body)
                connection.setblocking(False)
                waiting.append(_Stream(connection))
                self._selector.register(connection, selectors.EVENT_READ, waiting[-1])
                num_opened += 1
            self._turn()
            silent = [stream for stream in waiting if not stream.num_events]
            if len(silent) < len(waiting):
                waiting, until_s = silent, time.monotonic() + _SILENCE_S
        return {"opened": num_opened - len(waiting), "ended": self._num_ended}

    def measure(self, seconds: float) -> dict[str, Any]:
        began = self._clocks()
        num_before = self._num_events()
        self._latencies_s = array("d")
        while time.monotonic() < began[0] + seconds:
            self._turn()
        ended = self._clocks()
        latencies_s = sorted(self._latencies_s)
        return asdict(
            Measured(
                ended[0] - began[0],
                self._num_events() - num_before,
                len(self._selector.get_map()),
                ended[1] - began[1],
                ended[2] - began[2],
                percentile(latencies_s, 50) if latencies_s else None,
                percentile(latencies_s, 99) if latencies_s else None,
                latencies_s[-1] if latencies_s else None,
            )
        )

    def close(self) -> dict[str, Any]:
        for key in list(self._selector.get_map().values()):
            self._end(key.data)
        return {"ended": self._num_ended}

    def _clocks(self) -> tuple[float, float, float]:
        return time.monotonic(), sum(map(cpu_s, self._options.process_ids)), time.process_time()

    def _num_events(self) -> int:
        return sum(key.data.num_events for key in self._selector.get_map().values())

    def _turn(self) -> None:
        for key, _ in self._selector.select(0.01):
            self._read(key.data)

    def _read(self, stream: _Stream) -> None:
        try:
            data = stream.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._num_ended += 1
            self._end(stream)
            return
        now = time.monotonic()
        data = stream.rest + data
        whole = data.rfind(b"\n\n") + 2
        stream.rest = data[whole:] if whole > 1 else data
        for text in _TEXT.findall(data, 0, max(whole, 0)) if whole > 1 else ():
            number = self._number.get(text)
            if number is not None:
                stream.num_events += 1
                self._latencies_s.append(now - self._clock.sent_s(number))

    def _end(self, stream: _Stream) -> None:
        self._selector.unregister(stream.socket)
        stream.socket.close()


def main(arguments: Sequence[str]) -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    reader = Reader(Options(**json.loads(arguments[0])))
    for line in sys.stdin:
        command = json.loads(line)
        if "open" in command:
            answer = reader.open(command["open"])
        elif "measure" in command:
            answer = reader.measure(command["measure"])
        else:
            answer = reader.close()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

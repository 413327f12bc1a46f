"""A process that simulates many workers and some gateways around a coordinator. Run by ``tools/bench coordinator``.

``argv[1]`` holds its ``Options`` as JSON. For each measurement it reads a line of JSON from stdin and answers with
another; it ends when stdin ends. Between measurements its workers and gateways continue to send reports and heartbeats.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import zmq

from actorserve.sim.statistics import percentile
from tools.benchmarks.cluster.simulated_cluster import Shape, SimulatedCluster, Window
from tools.benchmarks.common.processes import cpu_s

_STDIN: Final = 0
_READ_BATCH: Final = 1000
_POLL_MS: Final = 1  # the most by which a frame is late
_GRACE_S: Final = 1.0  # for answers after the window
_LINGER_MS: Final = 100


@dataclass(frozen=True, slots=True)
class Options:
    """The coordinator's address and process id, and the workers and gateways to simulate."""

    coordinator_address: str
    coordinator_id: int
    num_workers: int
    num_gateways: int
    addresses: tuple[str, ...]
    load_report_s: float
    heartbeat_s: float
    death_after_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """One measurement of ``seconds``, after ``settle_s`` at the same rate."""

    rate: float
    settle_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates are requests per second; CPU shares are those of one core. Latencies are None if nothing was answered."""

    asked: float
    answered: float
    num_refused: int
    p50_s: float | None
    p99_s: float | None
    coordinator_cpu: float
    generator_cpu: float
    num_unsent: int
    num_lost: int


class Generator:
    """Sends the simulated cluster's frames, and measures the answers."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * len(options.addresses) + 64)
        self._router = self._context.socket(zmq.ROUTER)
        for address in options.addresses:
            self._router.bind(address)
        self._dealers = []
        for _ in options.addresses:
            dealer = self._context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.SNDHWM, 100_000)
            dealer.connect(options.coordinator_address)
            self._dealers.append(dealer)
        shape = Shape(
            options.num_workers, options.num_gateways, options.addresses, options.load_report_s, options.heartbeat_s
        )
        self._cluster = SimulatedCluster(shape, time.time_ns() // 1000, time.monotonic())
        self._num_unsent = 0
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(_STDIN, zmq.POLLIN)

    def run(self) -> None:
        """Run until stdin ends."""
        try:
            while self._cluster.num_met < self._cluster.num_processes:
                if self._turn() == "":
                    return
            _tell({"met": self._cluster.num_met})
            while (line := self._turn()) != "":
                if line is not None and not self._measure(Load(**json.loads(line))):
                    return
        finally:
            self._context.destroy(linger=_LINGER_MS)

    def _measure(self, load: Load) -> bool:
        """Measure one load. Returns False if stdin ended meanwhile."""
        now = time.monotonic()
        window = Window(load.rate, now + load.settle_s, now + load.settle_s + load.seconds)
        self._cluster.load(window, now)
        if not self._turns_until(window.begin_s):
            return False
        began = self._clocks()
        if not self._turns_until(window.end_s):
            return False
        ended = self._clocks()
        while not window.is_answered and time.monotonic() < window.end_s + _GRACE_S:
            if self._turn() == "":
                return False
        seconds = ended[0] - began[0]
        latencies_s = sorted(window.latencies_s)
        measured = Measured(
            asked=window.num_asked / load.seconds,
            answered=len(latencies_s) / load.seconds,
            num_refused=window.num_refused,
            p50_s=percentile(latencies_s, 50) if latencies_s else None,
            p99_s=percentile(latencies_s, 99) if latencies_s else None,
            coordinator_cpu=(ended[1] - began[1]) / seconds,
            generator_cpu=(ended[2] - began[2]) / seconds,
            num_unsent=self._num_unsent,
            num_lost=self._cluster.num_lost(time.monotonic(), self._options.death_after_s),
        )
        _tell(dataclasses.asdict(measured))
        return True

    def _turns_until(self, at_s: float) -> bool:
        while time.monotonic() < at_s:
            if self._turn() == "":
                return False
        return True

    def _clocks(self) -> tuple[float, float, float]:
        return time.monotonic(), cpu_s(self._options.coordinator_id), time.process_time()

    def _turn(self) -> str | None:
        """Send the frames that are due, and read those that have arrived.

        Returns a line of stdin, None without one, and "" at its end.
        """
        for link, frame in self._cluster.due(time.monotonic()):
            try:
                self._dealers[link].send(frame, zmq.NOBLOCK)
            except zmq.Again:
                self._num_unsent += 1
        events = dict(self._poller.poll(_POLL_MS))
        if self._router in events:
            now = time.monotonic()
            for _ in range(_READ_BATCH):
                try:
                    _, frame = self._router.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._cluster.take(frame, now)
        return os.read(_STDIN, 65536).decode() if _STDIN in events else None


def _tell(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    told = json.loads(arguments[0])
    Generator(Options(**{**told, "addresses": tuple(told["addresses"])})).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

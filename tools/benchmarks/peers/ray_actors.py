"""Two of Ray's actors on a Ray of their own. Run by the Python of Ray's environment, with a folder.

Ray writes its files into that folder, and its object store has the smallest size that Ray takes.
"""

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from tools.benchmarks.peers.calls import INSTANCE, Processes, request_id, serve, time_each, windows

_OBJECT_STORE_BYTES = 80 * 2**20  # Ray takes no less than 75 MiB
_NUM_CPUS = 2


class _Answering:
    def place(
        self, request_id: str, epoch: int, num_tokens: int, priority: int, kind: str, avoid: None, waited_s: float
    ) -> tuple[str, int, tuple[str, int], float]:
        return request_id, epoch, INSTANCE, 0.0

    def process_id(self) -> int:
        return os.getpid()


class _Calling:
    """Measures inside its own process; the driver only fetches the result."""

    def __init__(self, other: Any) -> None:
        self._other = other
        self._ray: Any = importlib.import_module("ray")

    def one_at_a_time(self, num_calls: int) -> list[float]:
        return time_each(lambda number: self._ray.get(self._send(number)), num_calls)

    def pipelined(self, num_calls: int, window: int) -> float:
        began = time.perf_counter()
        for count in windows(num_calls, window):
            self._ray.get([self._send(number) for number in range(count)])
        return time.perf_counter() - began

    def process_id(self) -> int:
        return os.getpid()

    def _send(self, number: int) -> Any:
        return self._other.place.remote(request_id(number), 1, 512, 0, "", None, 0.0)


class RayCaller:
    """Implements ``calls.Caller``."""

    def __init__(self, folder: str) -> None:
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}  # the latter writes into the home
        self._ray: Any = importlib.import_module("ray")
        self._ray.init(
            address="local",
            num_cpus=_NUM_CPUS,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=folder,
            log_to_driver=False,
        )
        other = self._ray.remote(num_cpus=0)(_Answering).remote()
        self._calling: Any = self._ray.remote(num_cpus=0)(_Calling).remote(other)
        self._pair: tuple[int, ...] = tuple(
            self._ray.get([other.process_id.remote(), self._calling.process_id.remote()])
        )

    def one_at_a_time(self, num_calls: int) -> list[float]:
        times: list[float] = self._ray.get(self._calling.one_at_a_time.remote(num_calls))
        return times

    def pipelined(self, num_calls: int, window: int) -> float:
        return float(self._ray.get(self._calling.pipelined.remote(num_calls, window)))

    def processes(self) -> Processes:
        return Processes(self._pair, tuple(sorted({os.getpid(), *descendants(os.getpid())})))

    def close(self) -> None:
        self._ray.shutdown()


def descendants(process_id: int, proc: Path = Path("/proc")) -> list[int]:
    """The children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for stat in proc.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # the process has just ended
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: list[int] = []
    new = [process_id]
    while new:
        new = [child for parent in new for child in children.get(parent, ())]
        found += new
    return found


if __name__ == "__main__":
    sys.exit(serve(RayCaller, (OSError, RuntimeError, ValueError)))

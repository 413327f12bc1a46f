"""The CPU time of a load report while requests wait for a kind of instance that is full.

Half of the instances are of that kind, and the others have room. So it is between two halves of a rolling upgrade: the
requests of a dead instance wait for one of their own kind. The core decides on real messages, without sockets or codec.
"""

import time
from typing import Final

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.state import ClusterState
from actorserve.core.messages import LoadReport, ModelInfo, Peer, PeerUp, Place, Role, WorkerInfo
from tools.benchmarks.common.errors import BenchError

_GATEWAY: Final = Peer("gateway-0", 1)
_NUM_BLOCKS: Final = 1000
_BLOCK_BYTES: Final = 16
_BLOCK_TOKENS: Final = 16
_NUM_REPORTS: Final = 1000
_OVERDUE_S: Final = 60.0


def report_cpu_s(num_workers: int, num_waiting: int) -> float:
    """The mean CPU seconds of a report. Raises: BenchError, if a request that should wait gets an instance."""
    state = ClusterState(ClusterConfig(max_waiting_requests=num_waiting))
    workers = [Peer(f"worker-{number}", 1) for number in range(num_workers)]
    for number, worker in enumerate(workers):
        is_full = number % 2 == 0
        model = ModelInfo("model", 1000, _NUM_BLOCKS * _BLOCK_TOKENS)
        state.handle(PeerUp(worker, Role.WORKER, WorkerInfo("old" if is_full else "new", model)), 0.0)
        state.handle(_report(0, _NUM_BLOCKS if is_full else _NUM_BLOCKS // 2), 0.0, worker)
    for number in range(num_waiting):
        place = Place(f"request-{number}", 2, 100 + number % 300, kind="old", avoid=Peer("dead", 1))
        state.handle(place, 0.0, _GATEWAY)
    began = time.thread_time()
    for number in range(_NUM_REPORTS):
        worker = workers[(2 * number + 1) % num_workers]
        state.handle(_report(1 + number, _NUM_BLOCKS // 2 + number % 7), _OVERDUE_S, worker)
    used_s = time.thread_time() - began
    if len(state.waiting) != num_waiting:
        raise BenchError(f"{num_waiting - len(state.waiting)} of {num_waiting} requests do not wait")
    return used_s / _NUM_REPORTS


def _report(sequence: int, num_used: int) -> LoadReport:
    used_bytes = num_used * _BLOCK_BYTES
    total_bytes = _NUM_BLOCKS * _BLOCK_BYTES
    return LoadReport(
        sequence,
        10,
        0,
        total_bytes,
        used_bytes,
        used_bytes,
        _BLOCK_BYTES,
        _BLOCK_TOKENS,
        0,
        kv_needed_bytes=used_bytes,
    )

"""How much of an engine's KV pool may be used while it runs, because others take memory, too. It loads no torch."""

import math
from pathlib import Path

from actorserve.host import ROOT, available_memory_bytes
from workers.kv.shared_memory import resident_shared_bytes

_MAX_RESERVE_BYTES = 512 * 2**20


class PoolWatch:
    """Measures how many blocks of a pool in host memory can be used, while other processes take and free memory.

    The resident pages of this process's shared memory belong to the pool and to ``num_host_blocks`` further blocks that
    KV is swapped out to; mappings of other processes' memory do not count. The available memory beyond a reserve (an
    eighth of what was available at first, at most 512 MiB) is divided by the number of workers on the host, so that
    all of them can use their parts at once. A worker's part goes first to the swap blocks that were not written yet,
    because their number is never limited later.
    """

    def __init__(
        self,
        num_blocks: int,
        bytes_per_block: int,
        num_workers_on_host: int,
        root: Path = ROOT,
        *,
        num_host_blocks: int = 0,
    ) -> None:
        self._num_blocks = num_blocks
        self._num_host_blocks = num_host_blocks
        self._bytes_per_block = bytes_per_block
        self._num_workers = num_workers_on_host
        self._root = root
        self._reserve_bytes = min(_MAX_RESERVE_BYTES, available_memory_bytes(root) // 8)

    def num_usable_blocks(self, num_written_host_blocks: int = 0) -> int:
        """The number of the pool's blocks that are resident already, or for which there is memory now.

        ``num_written_host_blocks``: how many swap blocks were ever written.
        """
        written = resident_shared_bytes() - num_written_host_blocks * self._bytes_per_block
        spare = max(0, available_memory_bytes(self._root) - self._reserve_bytes) // self._num_workers
        spare -= (self._num_host_blocks - num_written_host_blocks) * self._bytes_per_block
        usable = (max(0, written) + max(0, spare)) // self._bytes_per_block
        return min(self._num_blocks, usable)


class GpuPressure:
    """How many blocks of a pool in a GPU's memory may be used, by the free memory that the GPU's driver tells.

    The pool itself is allocated at the start, but iterations allocate their activations beside it. When other processes
    take the GPU's memory, so that less than a margin is free, the pool is used as if what is missing of the margin had
    to come out of it, because fewer requests need smaller activations. The margin is an eighth of what was free at the
    first reading, at most 512 MiB. Blocks that were handed out before stay usable, as on CPUs.
    """

    def __init__(self, num_blocks: int, bytes_per_block: int) -> None:
        self._num_blocks = num_blocks
        self._bytes_per_block = bytes_per_block
        self._margin_bytes: int | None = None

    def num_usable_blocks(self, free_bytes: int) -> int:
        """The number of the pool's blocks that may be used while so much of the GPU's memory is free."""
        if self._margin_bytes is None:
            self._margin_bytes = min(_MAX_RESERVE_BYTES, free_bytes // 8)
        missing = max(0, self._margin_bytes - free_bytes)
        return max(0, self._num_blocks - math.ceil(missing / self._bytes_per_block))

"""KV on the host: a pool of blocks, and copies between it and the device's pool, concurrent with the iterations.

On the host a block is one piece of memory with all layers. On the device it lies in many pieces (``KVCache.blocks``).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from actorserve.errors import SettingsError
from workers.kv.cache import KVCache
from workers.kv.pinning import CudaPinner, PinnedPool
from workers.kv.pools import check_copy
from workers.kv.shared_memory import SharedMemory
from workers.kv.staged_copier import StagedCopier

STAGING_BYTES = 64 * 2**20  # of a GPU's memory, as a buffer for copies


class HostPool:
    """``num_blocks`` blocks of host memory for KV that is swapped out of ``cache``. One thread copies.

    The pool lies in ``memory``, which other workers on this host can map. For a cache on the CPU a page becomes
    resident when it is first written. For a cache on a GPU the pool is pinned at once, and has fewer blocks than wanted
    if the driver pins no more.
    """

    def __init__(self, cache: KVCache, num_blocks: int, progress: Callable[[float], None] = lambda _: None) -> None:
        """``progress`` is called with the share of the pool that is pinned, 0 to 1.

        Raises: SettingsError if the memory cannot be allocated.
        """
        self.num_blocks = num_blocks
        self._num_device_blocks = cache.num_blocks
        _, num_pieces, piece_bytes = cache.blocks.shape
        self.memory: SharedMemory | None = None
        try:
            if cache.pool.is_cuda:
                self._pinned = PinnedPool(num_blocks, num_pieces * piece_bytes, CudaPinner(cache.pool.device), progress)
                self.memory, self.num_blocks = self._pinned.memory, self._pinned.num_blocks
            elif num_blocks:
                self.memory = SharedMemory(num_blocks * num_pieces * piece_bytes)
        except (OSError, OverflowError) as error:
            raise SettingsError(f"no memory for workers.host_kv_bytes: {error}") from None
        self.blocks = torch.empty((0, num_pieces, piece_bytes), dtype=torch.uint8)
        if self.memory is not None:
            flat = torch.frombuffer(self.memory.buffer, dtype=torch.uint8)
            self.blocks = flat.view(self.num_blocks, num_pieces, piece_bytes)
        self.written: set[int] = set()
        """Blocks that were ever written, by copies or by transfers from other workers."""
        self._copies: _Copies
        if cache.pool.is_cuda:
            self._copies = _StreamCopies(cache.blocks, self.blocks, self._pinned.blocks_per_chunk)
        else:
            self._copies = _PlainCopies(cache.blocks, self.blocks)

    @property
    def num_written_blocks(self) -> int:
        """Blocks that were ever written."""
        return len(self.written)

    def copy_out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """``workers.engine.Engine.copy_out``."""
        check_copy(device_blocks, self._num_device_blocks, host_blocks, self.num_blocks)
        self.written.update(host_blocks)
        self._copies.out(device_blocks, host_blocks)

    def copy_in(self, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> None:
        """``workers.engine.Engine.copy_in``."""
        check_copy(device_blocks, self._num_device_blocks, host_blocks, self.num_blocks)
        self._copies.into(device_blocks, host_blocks)


class _Copies(Protocol):
    """Copies blocks between device and host, both in the shape of ``KVCache.blocks``; returns after the copies."""

    def out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None: ...

    def into(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None: ...


class _PlainCopies:
    """Copies within the host's memory, by numpy: it starts no threads and releases the interpreter's lock. Torch's
    threads would compete for cores with the threads that compute.
    """

    def __init__(self, device: Tensor, host: Tensor) -> None:
        self._device, self._host = device.numpy(), host.numpy()

    def out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        for device, host in zip(device_blocks, host_blocks, strict=True):
            self._host[host] = self._device[device]

    def into(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        for device, host in zip(device_blocks, host_blocks, strict=True):
            self._device[device] = self._host[host]


class _StreamCopies:
    """Copies between a GPU and pinned memory, on a stream of their own. The GPU gathers and scatters blocks, so that
    few long copies cross the bus.

    Copies need not wait for the stream that computes: the core issues a copy after the end of the step that wrote its
    blocks, and a step ends when the device is done with it.
    """

    def __init__(self, device: Tensor, host: Tensor, blocks_per_chunk: int) -> None:
        """No copy crosses the border between two chunks of ``blocks_per_chunk`` blocks on the host."""
        self._copier = StagedCopier(device, host, STAGING_BYTES, blocks_per_chunk)
        self._stream = torch.cuda.Stream(device.device)  # type: ignore[no-untyped-call]

    def out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        self._copy(device_blocks, host_blocks, out=True)

    def into(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        self._copy(device_blocks, host_blocks, out=False)

    def _copy(self, device_blocks: Sequence[int], host_blocks: Sequence[int], *, out: bool) -> None:
        with torch.cuda.stream(self._stream):
            self._copier.copy(device_blocks, host_blocks, out=out)
            # A blocking event sleeps; other events would keep a core busy.
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
        copied.synchronize()

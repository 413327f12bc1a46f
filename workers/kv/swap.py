"""KV on the host: a pool of blocks, and the copies between it and the device's, which go beside the iterations.

On the host a block is one piece of memory, with all layers; on the device it lies in many pieces (``KVCache.blocks``).
"""

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from actorserve.errors import SettingsError
from workers.kv.cache import KVCache
from workers.kv.pools import check_copy
from workers.kv.shared_memory import SharedMemory
from workers.kv.staged_copier import StagedCopier

STAGING_BYTES = 64 * 2**20  # of a GPU's memory, through which copies go


class HostPool:
    """``num_blocks`` blocks of host memory for what is swapped out of ``cache``. One thread copies.

    It lies in ``memory``, which other workers on this host can map. For a cache on the CPU it becomes resident as
    blocks are first written; for one on a GPU it is pinned at once, so that copies go by themselves.
    """

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        """Raises: SettingsError where so much memory cannot be had or pinned."""
        self.num_blocks = num_blocks
        self._num_device_blocks = cache.num_blocks
        _, num_pieces, piece_bytes = cache.blocks.shape
        self.memory: SharedMemory | None = None
        self.blocks = torch.empty((0, num_pieces, piece_bytes), dtype=torch.uint8)
        if num_blocks:
            try:
                self.memory = SharedMemory(num_blocks * num_pieces * piece_bytes)
            except (OSError, OverflowError) as error:
                raise SettingsError(f"no memory for workers.host_kv_bytes: {error}") from None
            flat = torch.frombuffer(self.memory.buffer, dtype=torch.uint8)
            self.blocks = flat.view(num_blocks, num_pieces, piece_bytes)
        self.written: set[int] = set()
        """Blocks that were ever written, by copies or by whoever else writes there."""
        self._copies: _Copies
        if cache.pool.is_cuda:
            if num_blocks:
                self._pin()
            self._copies = _StreamCopies(cache.blocks, self.blocks)
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

    def _pin(self) -> None:
        """Torch's own pinned memory would be rounded up to a power of two."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address, num_bytes = self.blocks.data_ptr(), self.blocks.nbytes
        error = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if error:
            raise SettingsError(
                f"the driver cannot pin {num_bytes / 2**30:.2f} GiB of the host's memory (CUDA error {error}); "
                f"change workers.host_kv_bytes"
            )
        # Before the memory goes; at the process's end the driver does it.
        weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False


class _Copies(Protocol):
    """Copies blocks between device and host, both in the shape of ``KVCache.blocks``; returns once they are done."""

    def out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None: ...

    def into(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None: ...


class _PlainCopies:
    """Within the host's memory. By numpy, which takes no further threads for it, and lets go of the interpreter's lock:
    torch's threads would fight for the cores with those that compute.
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
    """Between a GPU and pinned memory, on a stream of their own. Blocks are gathered on the GPU, or scattered there, so
    that few long copies cross the bus.

    They need not wait for the stream that computes: a copy is asked for after the step that wrote its blocks has ended,
    and a step ends when the device has done it.
    """

    def __init__(self, device: Tensor, host: Tensor) -> None:
        self._copier = StagedCopier(device, host, STAGING_BYTES)
        self._stream = torch.cuda.Stream(device.device)  # type: ignore[no-untyped-call]

    def out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        self._copy(device_blocks, host_blocks, out=True)

    def into(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        self._copy(device_blocks, host_blocks, out=False)

    def _copy(self, device_blocks: Sequence[int], host_blocks: Sequence[int], *, out: bool) -> None:
        with torch.cuda.stream(self._stream):
            self._copier.copy(device_blocks, host_blocks, out=out)
            # Blocking: it sleeps, where others would keep a core busy.
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
        copied.synchronize()

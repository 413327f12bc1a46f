"""Pinned pools: memory that the driver keeps in place, so that a GPU copies from it and to it without the CPU."""

import contextlib
import logging
import math
import mmap
import time
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from workers.kv.shared_memory import SharedMemory

_CHUNK_BYTES = 2**30  # pinned at once; the driver takes up to a second for it

_log = logging.getLogger(__name__)


class Pinner(Protocol):
    """The driver's calls that pin memory."""

    def pin(self, address: int, num_bytes: int) -> str:
        """Pin this memory. Returns why that failed; empty if it did not."""
        ...

    def unpin(self, address: int) -> None:
        """Release the memory that was pinned at ``address``."""
        ...


class CudaPinner:
    """Pins through the driver, because torch would round its pinned memory up to a power of two."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def pin(self, address: int, num_bytes: int) -> str:
        error = self._runtime.cudaHostRegister(address, num_bytes, 0)
        if not int(error):
            return ""
        with contextlib.suppress(RuntimeError):
            # CUDA reports the error of a call again at the next kernel's launch, which must not be one of the model's.
            torch.zeros(1, device=self._device)
        return str(self._runtime.cudaGetErrorString(error))

    def unpin(self, address: int) -> None:
        self._runtime.cudaHostUnregister(address)


class PinnedPool:
    """``num_blocks`` blocks of pinned ``memory``, which other processes can map.

    The driver knows the memory as chunks of ``blocks_per_chunk`` blocks. It refuses copies that cross their borders.
    """

    def __init__(self, num_blocks: int, block_bytes: int, pinner: Pinner, progress: Callable[[float], None]) -> None:
        """Pin as many of ``num_blocks`` blocks as the driver pins; if they are fewer, a warning says why.

        ``progress`` is called with the share of the work that is done, 0 to 1.

        Raises: OSError, OverflowError if the kernel cannot provide the memory.
        """
        blocks_per_page = mmap.PAGESIZE // math.gcd(block_bytes, mmap.PAGESIZE)  # so that no two chunks share a page
        self.blocks_per_chunk = blocks_per_page * max(1, _CHUNK_BYTES // (blocks_per_page * block_bytes))
        self._block_bytes = block_bytes
        self._pinner = pinner
        began, wanted, why = time.perf_counter(), num_blocks, ""
        self.num_blocks = num_blocks
        self.memory: SharedMemory | None = None
        while self.num_blocks and self.memory is None:
            num_pinned, failed = self._pin(progress)
            # Other processes map the memory whole, so it must be no larger than what is pinned.
            self.num_blocks, why = num_pinned, failed or why
        if self.num_blocks < wanted:
            _log.warning(
                "only %s of %s GiB of the host's memory could be pinned for swapped KV (%s); a preempted request whose "
                "KV does not fit is computed again; see ulimit -l, the memory limits of containers, and "
                "workers.host_kv_bytes",
                _gib(self.num_blocks * block_bytes),
                _gib(wanted * block_bytes),
                why,
            )
        elif wanted:
            took_s = time.perf_counter() - began
            _log.info("pinned %s GiB of the host's memory for swapped KV in %.1f s", _gib(wanted * block_bytes), took_s)

    def _pin(self, progress: Callable[[float], None]) -> tuple[int, str]:
        """Pin ``num_blocks`` blocks and keep their memory, or none. Returns how many could be pinned, and the error."""
        memory = SharedMemory(self.num_blocks * self._block_bytes)
        base = torch.frombuffer(memory.buffer, dtype=torch.uint8).data_ptr()
        pinned: list[int] = []
        for first in range(0, self.num_blocks, self.blocks_per_chunk):
            address = base + first * self._block_bytes
            count = min(self.blocks_per_chunk, self.num_blocks - first)
            why = self._pinner.pin(address, count * self._block_bytes)
            if why:
                _unpin(self._pinner, pinned)
                return first, why
            pinned.append(address)
            progress((first + count) / self.num_blocks)
        self.memory = memory
        # Unpin before the memory is freed. At the process's end the driver does it.
        weakref.finalize(self, _unpin, self._pinner, pinned).atexit = False
        return self.num_blocks, ""


def _unpin(pinner: Pinner, addresses: list[int]) -> None:
    for address in addresses:
        pinner.unpin(address)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"

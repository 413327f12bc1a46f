"""Reading another worker's KV by NIXL, NVIDIA's library for RDMA: an optional extra (``pip install actorserve[nixl]``).

Blocks are read into a staging buffer, and copied from there into the pool. A read that timed out may still write
later, but only into a buffer that is never used again.
"""

import base64
import binascii
import contextlib
import importlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from actorserve.core.messages import KVAccess, KVTicket
from actorserve.errors import SettingsError
from workers.kv.pools import BlockMemory, HostBlocks, KVPools
from workers.kv_transfer.cuda import CudaBlocks
from workers.kv_transfer.errors import TransferError
from workers.kv_transfer.links import Pace

_STAGING_BYTES = 8 * 2**20
_POLL_S = 0.0002

Region = tuple[int, int, int]
"""Address, number of bytes, number of the GPU (0 for the host's memory)."""


class NixlAgent:
    """This worker's NIXL agent, with its pools registered. Other workers read them by ``shown``.

    Raises: SettingsError if NIXL is not installed, or cannot transfer here.
    """

    def __init__(self, pools: KVPools) -> None:
        try:
            api = importlib.import_module("nixl._api")
        except ImportError:
            raise SettingsError("NIXL is not installed: pip install 'actorserve[nixl]'") from None
        self.pools = pools
        self.lock = threading.Lock()
        try:
            self.agent: Any = api.nixl_agent(f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}")
            bases = []
            for pool in (pools.device, pools.host):
                kind, (address, _, gpu) = _memory(pool)
                if pool.num_blocks:
                    num_bytes = pool.num_blocks * pools.block_bytes
                    self.agent.register_memory([(address, num_bytes, gpu, "")], kind)
                bases.append(f"{kind}:{address}:{gpu}")
            metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        except RuntimeError as error:  # the base class of NIXL's exceptions
            raise SettingsError(f"NIXL cannot be used here: {error}") from None
        self.shown = " ".join([metadata, *bases])


class NixlLink:
    """A ``Link`` to another worker's agent. Raises: TransferError if the agent cannot be reached."""

    def __init__(
        self,
        here: NixlAgent,
        access: KVAccess,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._here = here
        self._patience_s = patience_s
        self._clock = clock
        self._sleep = sleep
        self._num_blocks = {False: access.num_blocks, True: access.num_host_blocks}
        self._bases: dict[bool, tuple[str, Region]] = {}
        try:
            metadata, *bases = access.nixl.split(" ")
            for on_host, base in zip((False, True), bases, strict=True):
                kind, address, gpu = base.split(":")
                self._bases[on_host] = kind, (int(address), 0, int(gpu))
            with here.lock:
                self._name = here.agent.add_remote_agent(base64.b64decode(metadata, validate=True))
        except (ValueError, binascii.Error, RuntimeError) as error:
            raise TransferError(f"cannot reach the source of the KV by NIXL: {error}") from None

    def read(
        self, ticket: KVTicket, num_skipped: int, blocks: Sequence[int], pace: Pace, *, into_host: bool = False
    ) -> None:
        pools = self._here.pools
        source_blocks = ticket.blocks[num_skipped:]
        if any(not 0 <= block < self._num_blocks[ticket.on_host] for block in source_blocks):
            raise TransferError("the ticket names blocks beyond the pool")
        most = max(1, _STAGING_BYTES // pools.block_bytes)
        pool = pools.pool(on_host=into_host)
        staging = self._stage(min(most, len(blocks)), pool)
        for first in range(0, len(blocks), most):
            part = blocks[first : first + most]
            pace(len(part) * pools.block_bytes)
            self._transfer(staging, ticket.on_host, source_blocks[first : first + most])
            if isinstance(pool, CudaBlocks):
                pool.write_from_device(part, staging, range(len(part)))
            else:
                pool.write(part, staging.numpy(), range(len(part)))

    def close(self) -> None:
        with self._here.lock, contextlib.suppress(RuntimeError):
            self._here.agent.remove_remote_agent(self._name)

    def _stage(self, num_blocks: int, pool: BlockMemory) -> torch.Tensor:
        """A buffer in the pool's kind of memory, new for each fetch, because a late read may write into an old one."""
        where = pool.blocks.device if isinstance(pool, CudaBlocks) else torch.device("cpu")
        return torch.empty((num_blocks, *self._here.pools.shape), dtype=torch.uint8, device=where)

    def _transfer(self, staging: torch.Tensor, on_host: bool, source_blocks: Sequence[int]) -> None:
        pools, agent = self._here.pools, self._here.agent
        kind, (base, _, gpu) = self._bases[on_host]
        there = _regions(base, gpu, self._num_blocks[on_host], pools.shape, source_blocks, on_host=on_host)
        number = max(0, staging.get_device())
        here = _regions(staging.data_ptr(), number, len(staging), pools.shape, range(len(source_blocks)), on_host=True)
        own_kind = "VRAM" if staging.is_cuda else "DRAM"
        try:
            with self._here.lock:
                registered = agent.register_memory([(staging.data_ptr(), staging.nbytes, number, "")], own_kind)
                handle = agent.initialize_xfer(
                    "READ", agent.get_xfer_descs(here, own_kind), agent.get_xfer_descs(there, kind), self._name
                )
                state = agent.transfer(handle)
            until = self._clock() + self._patience_s
            while state == "PROC" and self._clock() < until:
                self._sleep(_POLL_S)
                with self._here.lock:
                    state = agent.check_xfer_state(handle)
            with self._here.lock:
                agent.release_xfer_handle(handle)
                agent.deregister_memory(registered)
        except RuntimeError as error:
            _abandoned.append(staging)
            raise TransferError(f"reading KV by NIXL failed: {error}") from None
        if state != "DONE":
            _abandoned.append(staging)
            reason = f"took longer than {self._patience_s:g} s" if state == "PROC" else "failed"
            raise TransferError(f"reading KV by NIXL {reason}")


_abandoned: list[torch.Tensor] = []  # buffers that the network may still write into


def _memory(pool: BlockMemory) -> tuple[str, Region]:
    if isinstance(pool, CudaBlocks):
        return "VRAM", (pool.blocks.data_ptr(), pool.blocks.nbytes, pool.blocks.get_device())
    if isinstance(pool, HostBlocks):
        return "DRAM", (pool.array.ctypes.data, pool.array.nbytes, 0)
    raise TypeError(f"not a pool that NIXL can read: {pool}")


def _regions(
    base: int, gpu: int, num_blocks: int, shape: tuple[int, int], blocks: Sequence[int], *, on_host: bool
) -> list[Region]:
    """Where the pieces of ``blocks`` lie, block by block, in the layout of ``workers.kv.pools.view``."""
    pieces, piece_bytes = shape
    per_block, per_piece = (pieces * piece_bytes, piece_bytes) if on_host else (piece_bytes, num_blocks * piece_bytes)
    return [
        (base + block * per_block + piece * per_piece, piece_bytes, gpu)
        for block, piece in itertools.product(blocks, range(pieces))
    ]

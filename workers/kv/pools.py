"""A worker's KV pools as bytes. Transfers know nothing else of them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workers.kv.layer_progress import LayerProgress
from workers.kv.shared_memory import SharedMemory

Bytes = NDArray[np.uint8]
ALL_PIECES = slice(None)


class BlockMemory(Protocol):
    """Blocks of bytes in any memory. Any number of threads may call it concurrently with the engine."""

    @property
    def num_blocks(self) -> int: ...

    def read(self, blocks: Sequence[int], out: Bytes, pieces: slice = ALL_PIECES) -> None:
        """Gather these pieces of blocks into ``out``, [len(blocks), pieces, bytes of a piece]."""
        ...

    def write(
        self, blocks: Sequence[int], source: Bytes, source_blocks: Sequence[int], pieces: slice = ALL_PIECES
    ) -> None:
        """Copy ``source[source_blocks[i]]`` into these pieces of block ``blocks[i]``; ``source`` is [any, pieces, bytes
        of a piece].
        """
        ...


class HostBlocks:
    """Blocks in the host's memory: ``array`` is [num_blocks, pieces, bytes of a piece], of any strides.

    Numpy copies them: it releases the interpreter's lock and starts no threads.
    """

    def __init__(self, array: Bytes) -> None:
        self.array = array

    @property
    def num_blocks(self) -> int:
        return len(self.array)

    def read(self, blocks: Sequence[int], out: Bytes, pieces: slice = ALL_PIECES) -> None:
        copy_blocks(out, range(len(blocks)), self.array[:, pieces], blocks)

    def write(
        self, blocks: Sequence[int], source: Bytes, source_blocks: Sequence[int], pieces: slice = ALL_PIECES
    ) -> None:
        copy_blocks(self.array[:, pieces], blocks, source, source_blocks)


def copy_blocks(target: Bytes, target_blocks: Sequence[int], source: Bytes, source_blocks: Sequence[int]) -> None:
    """Copy block by block, in order. Blocks that are neighbours in source and target are copied together.

    In a device's pool neighbouring blocks lie side by side within a piece, so this makes fewer and longer copies.
    """
    first = 0
    for end in range(1, len(target_blocks) + 1):
        if (
            end < len(target_blocks)
            and target_blocks[end] == target_blocks[end - 1] + 1
            and source_blocks[end] == source_blocks[end - 1] + 1
        ):
            continue
        there, here, count = target_blocks[first], source_blocks[first], end - first
        np.copyto(target[there : there + count].transpose(1, 0, 2), source[here : here + count].transpose(1, 0, 2))
        first = end


@dataclass(frozen=True, slots=True)
class KVPools:
    """An engine's KV as transfers see it.

    Blocks may be copied between engines of the same ``layout``. ``shape`` is (pieces, bytes of a piece) of a block in
    either pool. ``device_memory`` and ``host_memory`` are the pools' memory if other processes can map it, laid out as
    `view` says: the device's pool piece by piece with all blocks in each, the host's pool block by block. ``progress``
    tells how far the iterations are that write the device's pool; without it, other workers read only what no iteration
    writes any more.
    """

    layout: str
    shape: tuple[int, int]
    device: BlockMemory
    host: BlockMemory
    device_memory: SharedMemory | None = None
    host_memory: SharedMemory | None = None
    host_written: set[int] = field(default_factory=set)  # blocks on the host that were ever written
    progress: LayerProgress | None = None

    @property
    def num_layers(self) -> int:
        """Layers whose pieces lie one after another in a block; 1 if that is not known."""
        return 1 if self.progress is None else self.progress.num_layers

    @property
    def block_bytes(self) -> int:
        return self.shape[0] * self.shape[1]

    def pool(self, *, on_host: bool) -> BlockMemory:
        return self.host if on_host else self.device


def view(buffer: Any, num_blocks: int, shape: tuple[int, int], *, on_host: bool) -> Bytes:
    """A pool's memory, ``buffer``, as [num_blocks, pieces, bytes of a piece]."""
    pieces, piece_bytes = shape
    flat: Bytes = np.frombuffer(buffer, dtype=np.uint8, count=num_blocks * pieces * piece_bytes)
    if on_host:
        return flat.reshape(num_blocks, pieces, piece_bytes)
    return flat.reshape(pieces, num_blocks, piece_bytes).transpose(1, 0, 2)


def layout_digest(**facts: object) -> str:
    """A name for the layout of blocks: equal only for equal facts."""
    return hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:32]


def check_copy(device_blocks: Sequence[int], num_blocks: int, host_blocks: Sequence[int], num_host_blocks: int) -> None:
    """Check a copy between the device's pool and the host's against their sizes.

    Raises: ValueError if it names a block that does not exist, a block twice, or more blocks on one side.
    """
    if len(device_blocks) != len(host_blocks):
        raise ValueError(f"a copy of {len(device_blocks)} blocks on the device and {len(host_blocks)} on the host")
    for where, blocks, count in (("device", device_blocks, num_blocks), ("host", host_blocks, num_host_blocks)):
        if any(not 0 <= block < count for block in blocks):
            raise ValueError(f"a copy of {where} blocks {sorted(blocks)}: there are {count} blocks")
        if len(set(blocks)) != len(blocks):
            raise ValueError(f"a copy names a {where} block twice: {sorted(blocks)}")

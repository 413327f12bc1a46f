"""Reading a pool on a GPU of this host from another process, GPU to GPU."""

from collections.abc import Sequence

from actorserve.core.messages import KVTicket
from workers.kv.pools import KVPools
from workers.kv_transfer.cancellation import Cancellation
from workers.kv_transfer.cuda import CudaBlocks
from workers.kv_transfer.errors import TransferError
from workers.kv_transfer.links import Pace

_STRIDE_BYTES = 4 * 2**20  # to copy between two calls of ``pace``


class CudaPool:
    """A ``Link`` to a pool on a GPU that another process exported as ``shown``; open while this object lives."""

    def __init__(self, shown: str, num_blocks: int, pools: KVPools, device: CudaBlocks) -> None:
        """Raises: DirectCopyError if the pool cannot be opened."""
        self._source = device.open_peer(shown, num_blocks)
        self._block_bytes = pools.block_bytes
        self._device = device

    def read(
        self,
        ticket: KVTicket,
        num_skipped: int,
        blocks: Sequence[int],
        pace: Pace,
        cancellation: Cancellation,
        *,
        into_host: bool = False,
    ) -> None:
        if into_host:
            raise ValueError("this link copies from GPU to GPU only")
        source_blocks = ticket.blocks[num_skipped:]
        if any(not 0 <= block < len(self._source) for block in source_blocks):
            raise TransferError(f"the ticket names blocks beyond the pool's {len(self._source)}")
        stride = max(1, _STRIDE_BYTES // self._block_bytes)
        for first in range(0, len(blocks), stride):
            part = blocks[first : first + stride]
            pace(len(part) * self._block_bytes)
            self._device.write_from_peer(part, self._source, source_blocks[first : first + stride])

    def close(self) -> None:
        self._source = self._source[:0].clone()

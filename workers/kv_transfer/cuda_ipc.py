"""Reading a pool on a GPU of this host from another process, GPU to GPU."""

from collections.abc import Sequence

from actorserve.core.messages import KVTicket
from workers.kv.pools import KVPools
from workers.kv_transfer.cancellation import Cancellation
from workers.kv_transfer.cuda import CudaBlocks
from workers.kv_transfer.links import Follower, Pace, SharedPool

_STRIDE_BYTES = 4 * 2**20  # to copy between two calls of ``pace``


class CudaPool:
    """A ``Link`` to a pool on a GPU that another process exported as ``shown``; open while this object lives."""

    def __init__(self, shown: str, num_blocks: int, pools: KVPools, device: CudaBlocks, follower: Follower) -> None:
        """Raises: DirectCopyError if the pool cannot be opened."""
        self._source = device.open_peer(shown, num_blocks)
        self._shared = SharedPool(num_blocks, pools, follower, _STRIDE_BYTES)
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
        for copy in self._shared.copies(ticket, num_skipped, blocks, pace, cancellation):
            self._device.write_from_peer(copy.target, self._source[:, copy.pieces], copy.source, copy.pieces)

    def close(self) -> None:
        self._source = self._source[:0].clone()

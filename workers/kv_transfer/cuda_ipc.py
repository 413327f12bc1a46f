"""Reading a pool on a GPU of this host from another process, GPU to GPU."""

from collections.abc import Sequence

from actorserve.core.messages import KVTicket
from workers.kv.pools import KVPools
from workers.kv_transfer.cancellation import Cancellation
from workers.kv_transfer.cuda import CudaBlocks
from workers.kv_transfer.errors import TransferError
from workers.kv_transfer.links import Follower, Pace
from workers.kv_transfer.parts import parts_of

_STRIDE_BYTES = 4 * 2**20  # to copy between two calls of ``pace``


class CudaPool:
    """A ``Link`` to a pool on a GPU that another process exported as ``shown``; open while this object lives."""

    def __init__(self, shown: str, num_blocks: int, pools: KVPools, device: CudaBlocks, follower: Follower) -> None:
        """Raises: DirectCopyError if the pool cannot be opened."""
        self._source = device.open_peer(shown, num_blocks)
        self._pools = pools
        self._device = device
        self._follower = follower

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
        pieces, piece_bytes = self._pools.shape
        stride = max(1, _STRIDE_BYTES // self._pools.block_bytes)
        if ticket.by_layer:
            stride *= self._pools.num_layers
        for part in parts_of(ticket, num_skipped, stride, pieces, self._pools.num_layers):
            self._follower.wait_for(part, cancellation)
            pace(part.num_bytes(piece_bytes))
            these, those = blocks[part.begin : part.end], source_blocks[part.begin : part.end]
            self._device.write_from_peer(these, self._source[:, part.pieces], those, part.pieces)

    def close(self) -> None:
        self._source = self._source[:0].clone()

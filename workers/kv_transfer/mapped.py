"""Reading another process's pool through a read-only mapping of its memory: one copy, and no risk for the source."""

from collections.abc import Sequence

from actorserve.core.messages import KVTicket
from workers.kv.pools import KVPools, view
from workers.kv.shared_memory import attach
from workers.kv_transfer.cancellation import Cancellation
from workers.kv_transfer.errors import TransferError
from workers.kv_transfer.links import Pace

_STRIDE_BYTES = 256 * 2**10  # to copy between two calls of ``pace``


class MappedPool:
    """A ``Link`` to one pool of another process on this host, mapped as long as this object lives."""

    def __init__(self, shown: str, num_blocks: int, pools: KVPools, *, on_host: bool) -> None:
        """Raises: TransferError if the pool cannot be mapped."""
        pieces, piece_bytes = pools.shape
        try:
            memory = attach(shown, num_blocks * pieces * piece_bytes)
        except ValueError as error:
            raise TransferError(str(error)) from None
        self._source = view(memory, num_blocks, pools.shape, on_host=on_host)
        self._pools = pools

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
        pool = self._pools.pool(on_host=into_host)
        source_blocks = ticket.blocks[num_skipped:]
        if any(not 0 <= block < len(self._source) for block in source_blocks):
            raise TransferError(f"the ticket names blocks beyond the pool's {len(self._source)}")
        stride = max(1, _STRIDE_BYTES // self._pools.block_bytes)
        for first in range(0, len(blocks), stride):
            part = blocks[first : first + stride]
            pace(len(part) * self._pools.block_bytes)
            pool.write(part, self._source, source_blocks[first : first + stride])

    def close(self) -> None:
        self._source = self._source[:0].copy()

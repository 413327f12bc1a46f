"""Reading another process's pool through a read-only mapping of its memory: one copy, and no risk for the source."""

from collections.abc import Sequence

from actorserve.core.messages import KVTicket
from workers.kv.pools import KVPools, view
from workers.kv.shared_memory import attach
from workers.kv_transfer.cancellation import Cancellation
from workers.kv_transfer.errors import TransferError
from workers.kv_transfer.links import Follower, Pace, SharedPool

_STRIDE_BYTES = 256 * 2**10  # to copy between two calls of ``pace``


class MappedPool:
    """A ``Link`` to one pool of another process on this host, mapped as long as this object lives."""

    def __init__(self, shown: str, num_blocks: int, pools: KVPools, follower: Follower, *, on_host: bool) -> None:
        """Raises: TransferError if the pool cannot be mapped."""
        pieces, piece_bytes = pools.shape
        try:
            memory = attach(shown, num_blocks * pieces * piece_bytes)
        except ValueError as error:
            raise TransferError(str(error)) from None
        self._source = view(memory, num_blocks, pools.shape, on_host=on_host)
        self._pools = pools
        self._shared = SharedPool(num_blocks, pools, follower, _STRIDE_BYTES)

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
        for copy in self._shared.copies(ticket, num_skipped, blocks, pace, cancellation):
            pool.write(copy.target, self._source[:, copy.pieces], copy.source, copy.pieces)

    def close(self) -> None:
        self._source = self._source[:0].copy()

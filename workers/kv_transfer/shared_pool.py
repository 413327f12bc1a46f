"""The copies by which a worker reads a pool that lies open to it, in this host's memory or on one of its GPUs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actorserve.core.messages import KVTicket
from workers.kv.pools import KVPools
from workers.kv_transfer.cancellation import Cancellation
from workers.kv_transfer.errors import TransferError
from workers.kv_transfer.links import Follower, Pace
from workers.kv_transfer.parts import parts_of


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the ``pieces`` of the source's blocks ``source`` into the reader's blocks ``target``."""

    target: Sequence[int]
    source: Sequence[int]
    pieces: slice


@dataclass(frozen=True, slots=True)
class SharedPool:
    """A pool of ``num_blocks`` blocks of another process, as the reader with ``pools`` sees it. A copy has about
    ``stride_bytes``, so that a read can be paced and cancelled.
    """

    num_blocks: int
    pools: KVPools
    follower: Follower
    stride_bytes: int

    def copies(
        self, ticket: KVTicket, num_skipped: int, blocks: Sequence[int], pace: Pace, cancellation: Cancellation
    ) -> Iterator[Copy]:
        """The copies of a read (``Link.read``), each when the source has written what it copies.

        Raises: TransferError.
        """
        source_blocks = ticket.blocks[num_skipped:]
        if any(not 0 <= block < self.num_blocks for block in source_blocks):
            raise TransferError(f"the ticket names blocks beyond the pool's {self.num_blocks}")
        num_pieces, piece_bytes = self.pools.shape
        per_copy = max(1, self.stride_bytes // self.pools.block_bytes)
        if ticket.by_layer:
            per_copy *= self.pools.num_layers
        for part in parts_of(ticket, num_skipped, per_copy, num_pieces, self.pools.num_layers):
            self.follower.wait_for(part, cancellation)
            pace(part.num_bytes(piece_bytes))
            yield Copy(blocks[part.begin : part.end], source_blocks[part.begin : part.end], part.pieces)

"""The protocol of every way to read another worker's KV, and what they share."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from actorserve.core.messages import KVTicket
from workers.kv.layer_progress import Seen, SeenProgress, StuckError, wait_until
from workers.kv.pools import KVPools
from workers.kv_transfer.cancellation import Cancellation
from workers.kv_transfer.errors import TransferError
from workers.kv_transfer.parts import Part, parts_of

Pace = Callable[[int], None]
"""Called with a number of bytes before they are copied; returns when they may be copied. Raises: TransferError if the
read was cancelled.
"""


class Link(Protocol):
    """Reads one worker's blocks into this worker's pools. Used by one thread at a time."""

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
        """Copy the ticket's blocks, except the first ``num_skipped``, into ``blocks`` in order: blocks of the device's
        pool, or of the host's pool if ``into_host``. Waits for the iteration that the ticket names. ``cancellation``
        ends a wait for the source.

        Raises: TransferError; after it nothing more is written.
        """
        ...

    def close(self) -> None:
        """Release the source's memory, or the connection to it."""
        ...


class Follower:
    """Follows the iterations of a worker on this host that shows its progress as ``shown``; empty: it shows none."""

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._progress: Seen | None = None

    def wait_for(self, part: Part, cancellation: Cancellation) -> None:
        """Return when the part of a read may be read.

        Raises: TransferError if the source gets no further, or shows no progress; or if the read is cancelled.
        """
        if not part.least:
            return
        try:
            if self._progress is None:
                self._progress = SeenProgress(self._shown)
            wait_until(self._progress, part.least, cancellation.check)
        except (ValueError, StuckError) as error:
            raise TransferError(str(error)) from None


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the ``pieces`` of the source's blocks ``source`` into the reader's blocks ``target``."""

    target: Sequence[int]
    source: Sequence[int]
    pieces: slice


@dataclass(frozen=True, slots=True)
class SharedPool:
    """A pool of ``num_blocks`` blocks of another process that lies open to this worker, in this host's memory or on one
    of its GPUs. This worker reads it into ``pools``. A copy has about ``stride_bytes``, so that a read can be paced and
    cancelled.
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


def this_host() -> str:
    """A name for this boot of this machine and this pid namespace, in which processes see each other under /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"

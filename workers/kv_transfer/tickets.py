"""The source's check of what a reader asks for: a genuine ticket that was not used before."""

import threading
from collections import OrderedDict

from actorserve.core.kv.tickets import is_genuine
from actorserve.core.messages import TransferId
from workers.kv.pools import KVPools
from workers.kv_transfer.frames import BLOCK_NUMBER_BYTES, REQUEST_BYTES, Read

CHUNK_BYTES = 2**22
"""A chunk's largest size, except for a chunk of one block."""

_MAX_USED_TICKETS = 100_000  # remembered, so that no ticket is used twice


class Tickets:
    """Tickets for blocks of ``pools`` that were made with ``ticket_key``. Any number of threads may use it."""

    def __init__(self, pools: KVPools, ticket_key: bytes) -> None:
        self._pools = pools
        self._ticket_key = ticket_key
        self._lock = threading.Lock()
        self._used: OrderedDict[tuple[TransferId, int], None] = OrderedDict()  # (transfer, stage) of tickets
        num_blocks = max(pools.device.num_blocks, pools.host.num_blocks)
        self.max_request_bytes = REQUEST_BYTES + BLOCK_NUMBER_BYTES * num_blocks

    def refusal(self, read: Read) -> str | None:
        """Why this read is refused; None if it is granted, and then its ticket counts as used."""
        ticket = read.ticket
        if not is_genuine(self._ticket_key, ticket):
            return "the ticket is not genuine"
        num_blocks = self._pools.pool(on_host=ticket.on_host).num_blocks
        if any(block >= num_blocks for block in ticket.blocks) or read.num_skipped > len(ticket.blocks):
            return "the ticket names blocks beyond the pool"
        if read.per_chunk > max(1, CHUNK_BYTES // self._pools.block_bytes):
            return "the chunk has too many blocks"
        if ticket.step_id and self._pools.progress is None:
            return "the progress of iterations is not known"
        with self._lock:
            if (ticket.transfer, ticket.stage) in self._used:
                return "the ticket was used before"
            self._used[ticket.transfer, ticket.stage] = None
            if len(self._used) > _MAX_USED_TICKETS:
                self._used.popitem(last=False)
        return None

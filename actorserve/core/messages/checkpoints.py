"""Messages: copies of a request's KV in another worker's host memory (``core.checkpoints``).

``s`` is the worker that runs the request, ``h`` the worker that holds its checkpoints.
"""

from actorserve.core.messages.transfers import KVTicket, TransferId
from actorserve.core.messages.value import value
from actorserve.core.messages.values import Peer


@value
class CheckpointTo:
    """c -> s: from now on keep checkpoints of your requests' KV in this worker's host memory."""

    holder: Peer


@value
class Checkpoint:
    """s -> h: copy the ticket's blocks to the host's memory, behind the ``num_confirmed`` rows that are confirmed.

    Rows that were copied and not confirmed are void. ``token_ids`` are the tokens of the ticket's blocks. Answered by
    Copied or Declined. Confirmed rows stay if the reason is NO_BLOCKS or UNREACHABLE. Repeatable.
    """

    request_id: str
    gateway: Peer
    num_confirmed: int
    token_ids: tuple[int, ...]
    ticket: KVTicket

    @property
    def transfer(self) -> TransferId:
        return self.ticket.transfer


@value
class CheckpointConfirmed:
    """s -> h: the blocks of this stage belonged to the request for as long as they were being copied."""

    transfer: TransferId
    stage: int


@value
class Checkpointed:
    """s -> g: if I die, let ``holder`` carry the request on with the KV that this transfer copied."""

    request_id: str
    epoch: int
    holder: Peer
    transfer: TransferId

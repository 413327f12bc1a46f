"""Messages: copies of a request's KV in another worker's host memory (``core.checkpoints``)."""

from dataclasses import dataclass

from actorserve.core.messages.values import KVTicket, Peer


@dataclass(frozen=True, slots=True)
class CheckpointTo:
    """c -> w: from now on keep copies of your requests' KV in this worker's host memory
    (``core.checkpoints.source``).
    """

    holder: Peer


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """s -> guardian: copy what the ticket names to the host's memory, after the ``num_confirmed`` blocks that count.

    What was copied and not confirmed is void. ``token_ids`` are those of the ticket's blocks. Answered by Copied, or
    Declined; what counts already stays where that is for want of blocks, or of a way to read. Repeatable.
    """

    number: int
    request_id: str
    gateway: Peer
    num_confirmed: int
    token_ids: tuple[int, ...]
    ticket: KVTicket


@dataclass(frozen=True, slots=True)
class CheckpointConfirmed:
    """s -> guardian: what this stage copied was the request's all the time."""

    number: int
    stage: int


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """w -> g: should I die, have ``holder`` carry the request on, with the KV that it copied under ``number``."""

    request_id: str
    epoch: int
    holder: Peer
    number: int

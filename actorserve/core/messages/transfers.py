"""What identifies a transfer of a request's KV from one worker to another, and what allows it to be read."""

from enum import StrEnum
from typing import NamedTuple

from actorserve.core.messages.value import value
from actorserve.core.messages.values import Peer


class TransferKind(StrEnum):
    """Why KV is copied to another worker."""

    MIGRATION = "migration"  # the request moves there
    CHECKPOINT = "checkpoint"  # the request goes on there if its worker dies


class TransferId(NamedTuple):
    """One transfer as its source names it: ``number`` counts the source's transfers of this kind."""

    kind: TransferKind
    number: int


class Transfer(NamedTuple):
    """One transfer as the rest of the cluster names it: with its source, because each source counts for itself."""

    source: Peer
    id: TransferId


class DeclineReason(StrEnum):
    """Why a destination does not take a stage of a transfer."""

    NO_BLOCKS = "no_blocks"  # too few blocks are free for this stage
    DRAINING = "draining"
    UNREACHABLE = "unreachable"  # the destination cannot read the source's KV, or reading it failed
    UNKNOWN = "unknown"  # the destination gave the transfer up, or never heard of it


@value
class KVTicket:
    """Permission to read these blocks of a worker's pool once, for one stage of a transfer.

    ``secret`` proves that the worker gave it (``core.kv.tickets``). The blocks lie in the host's pool if ``on_host``,
    else in the device's. ``step_id`` is the worker's iteration that writes the last of them; 0: nothing writes them any
    more. The blocks may be read once that iteration has ended; with ``by_layer``, each layer's part of them once the
    iteration is past that layer.
    """

    transfer: TransferId
    stage: int
    on_host: bool
    blocks: tuple[int, ...]
    secret: str
    step_id: int = 0
    by_layer: bool = False

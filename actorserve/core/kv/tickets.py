"""Tickets: permission to read blocks of a worker's KV pool, sent over the control plane, shown on the data plane.

A ticket carries a keyed hash of what it allows, so the worker that issued it need not remember it. The server of the
blocks ensures that each ticket is used only once (``workers.kv_transfer``). A process that may map the worker's
memory, one of the same user on the same host, needs no ticket.
"""

from hashlib import blake2b
from hmac import compare_digest

from actorserve.core.messages import KVTicket, TransferId

KEY_BYTES = 32


def make_ticket(
    key: bytes,
    transfer: TransferId,
    stage: int,
    blocks: tuple[int, ...],
    *,
    on_host: bool,
    step_id: int = 0,
    by_layer: bool = False,
) -> KVTicket:
    """A ticket for these blocks that is valid at the worker with this ``key`` (1 to 64 bytes).

    Raises: ValueError for an empty key, because anyone could forge such tickets.
    """
    if not key:
        raise ValueError("a ticket needs a key")
    secret = _secret(key, transfer, stage, blocks, on_host, step_id, by_layer)
    return KVTicket(transfer, stage, on_host, blocks, secret, step_id, by_layer)


def is_genuine(key: bytes, ticket: KVTicket) -> bool:
    """Whether the worker with this ``key`` issued exactly this ticket."""
    secret = _secret(key, ticket.transfer, ticket.stage, ticket.blocks, ticket.on_host, ticket.step_id, ticket.by_layer)
    return compare_digest(secret.encode(), ticket.secret.encode())


def _secret(
    key: bytes,
    transfer: TransferId,
    stage: int,
    blocks: tuple[int, ...],
    on_host: bool,
    step_id: int,
    by_layer: bool,
) -> str:
    text = repr((transfer.kind.value, transfer.number, stage, on_host, blocks, step_id, by_layer))
    return blake2b(text.encode(), digest_size=32, key=key).hexdigest()

"""Tickets: leave to read blocks of a worker's KV pool, given over the control plane and shown on the data plane.

A ticket is a keyed hash of what it allows, so the worker that gave it need not remember it. That it is used only once
is up to who serves the blocks (``workers.kv_transfer``). Who may map a worker's memory, its own user on its own host,
needs none.
"""

from hashlib import blake2b
from hmac import compare_digest

from actorserve.core.messages import KVTicket

KEY_BYTES = 32


def make_ticket(key: bytes, number: int, stage: int, blocks: tuple[int, ...], *, on_host: bool) -> KVTicket:
    """A ticket for these blocks, good with the holder of ``key`` (1 to 64 bytes).

    Raises: ValueError without a key: anybody could make such tickets.
    """
    if not key:
        raise ValueError("a ticket needs a key")
    return KVTicket(number, stage, on_host, blocks, _secret(key, number, stage, blocks, on_host))


def is_genuine(key: bytes, ticket: KVTicket) -> bool:
    """Whether the holder of ``key`` gave this very ticket."""
    secret = _secret(key, ticket.number, ticket.stage, ticket.blocks, ticket.on_host)
    return compare_digest(secret.encode(), ticket.secret.encode())


def _secret(key: bytes, number: int, stage: int, blocks: tuple[int, ...], on_host: bool) -> str:
    text = repr((number, stage, on_host, blocks))
    return blake2b(text.encode(), digest_size=32, key=key).hexdigest()

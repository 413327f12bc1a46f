"""Defaults that several cores share."""

from typing import Final

RETRY_S: Final = 1.0
"""A message that was not answered is sent again after this time: any message to a peer may be lost."""

MAX_QUEUE_PER_INSTANCE: Final = 64
"""How many requests may wait on one instance for their first iteration. Coordinator and gateways agree on it, because
gateways place requests themselves while the coordinator is gone.
"""


def placement_ttl_s(retry_s: float) -> float:
    """How long a placement counts if no load report confirms it, because its gateway may have died."""
    return 5 * retry_s

"""A request that is ready for its hand-over at the gateway."""

from actorserve.core.messages import Attained, HandOver, Peer
from tests.core.harness.driver import migration_id
from tests.core.harness.gateway import A, B, Gateway, running, tokens

ATTAINED = Attained(service_s=1.0, quantum_s=0.5)
HAND_OVER = HandOver("r", 1, B, migration_id(3), 2, ATTAINED)
"""A asks to hand the request over to B, which has copied its KV. The request has two tokens."""


def with_tokens(count: int = 2, *workers: Peer) -> Gateway:
    """Request r runs on A under epoch 1, and its client has ``count`` tokens: 10, 11, ..."""
    gateway = running(*(workers or (A, B)))
    for position in range(count):
        gateway.handle(tokens(1, position, 10 + position), 0.0, A)
    return gateway

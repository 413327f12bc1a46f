"""Messages: asking the coordinator for an instance."""

from dataclasses import dataclass

from actorserve.core.messages.values import NEWCOMER, Attained, Peer, RefusalReason


@dataclass(frozen=True, slots=True)
class Place:
    """g -> c: choose an instance for this request. Repeatable: the same (request, epoch) gets the same answer.

    ``num_tokens`` counts what must be prefilled (prompt and output so far). ``kind`` is the kind that made the tokens
    so far ("" when there are none): an instance of that kind is preferred, so that the answer does not change.
    ``avoid`` is the instance that just failed this request, which the coordinator may not have noticed yet.
    ``waited_s`` is how long it has waited elsewhere since it came or got its last token. ``prefix_names`` are those of
    the prompt's beginnings, the shortest first (``core.placement.prefix_map``).
    """

    request_id: str
    epoch: int
    num_tokens: int
    priority: int = 0
    kind: str = ""
    avoid: Peer | None = None
    waited_s: float = 0.0
    prefix_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """c -> g: start it there. ``waited_s`` is how long it waited in the cluster's queue."""

    request_id: str
    epoch: int
    instance: Peer
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Refused:
    """c -> g, w -> g: not taken, or given back, and nothing is held for it. What was given back is repeated until the
    gateway releases it, and has ``attained`` so much here.
    """

    request_id: str
    epoch: int
    reason: RefusalReason
    retry_after_s: float
    attained: Attained = NEWCOMER


@dataclass(frozen=True, slots=True)
class Unplace:
    """g -> c: the client left before the request was started; forget it."""

    request_id: str
    epoch: int

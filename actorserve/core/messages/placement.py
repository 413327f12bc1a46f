"""Messages: asking the coordinator for an instance."""

from actorserve.core.messages.value import value
from actorserve.core.messages.values import NEWCOMER, Attained, Energy, Peer, RefusalReason


@value
class Place:
    """g -> c: choose an instance for this request. Repeatable: the same (request, epoch) gets the same answer.

    ``num_tokens`` counts what must be prefilled (prompt and output so far). ``kind`` is the kind of worker that made
    the tokens so far ("" if there are none): an instance of that kind is preferred, so that the answer does not change.
    ``avoid`` is an instance that has just failed this request, which the coordinator may not have noticed yet.
    ``waited_s`` is how long the request has waited elsewhere since it came or got its last token. ``prefix_names`` name
    the prompt's prefixes, the shortest first (``core.placement.prefix_map``).
    """

    request_id: str
    epoch: int
    num_tokens: int
    priority: int = 0
    kind: str = ""
    avoid: Peer | None = None
    waited_s: float = 0.0
    prefix_names: tuple[str, ...] = ()


@value
class Placed:
    """c -> g: start the request on ``instance``. It waited ``waited_s`` in the cluster's queue.

    ``token_instance``, if there is one, decodes the request after ``instance`` has computed the prompt.
    """

    request_id: str
    epoch: int
    instance: Peer
    waited_s: float = 0.0
    token_instance: Peer | None = None


@value
class Refused:
    """c -> g, w -> g: the sender does not accept the request, or gives it up, and holds nothing for it.

    A worker repeats this until the gateway releases the request. ``attained`` is what the request got on that worker,
    and ``energy`` what the worker spent on it; None if the worker does not know that.
    """

    request_id: str
    epoch: int
    reason: RefusalReason
    retry_after_s: float
    attained: Attained = NEWCOMER
    energy: Energy | None = None


@value
class Unplace:
    """g -> c: forget this placement of the request: it has ended, or goes elsewhere."""

    request_id: str
    epoch: int

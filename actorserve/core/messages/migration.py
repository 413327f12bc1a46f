"""Messages: moving a request between workers (``core.migration``).

``s`` is the source and ``d`` the destination, two workers.
"""

from dataclasses import dataclass

from actorserve.core.messages.values import Attained, DeclineReason, KVTicket, Peer, RequestSpec


@dataclass(frozen=True, slots=True)
class MigrateTo:
    """c -> w: for the next ``ttl_s`` move requests there, of so many bytes of KV in all, one after another.

    A later one takes its place; one of 0 bytes ends it. What is under way goes on.
    """

    destination: Peer
    num_bytes: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Offer:
    """s -> d, the first stage: reserve blocks for this request, and copy what the ticket names.

    KV exists for the first ``num_computed`` of its tokens, all in the ticket's blocks. With ``is_last`` the request
    stands still, and these are all of its tokens.
    """

    number: int
    epoch: int
    gateway: Peer
    request: RequestSpec
    num_computed: int
    ticket: KVTicket
    is_last: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """s -> d, each further stage: ``token_ids`` were made since, and the ticket's blocks come after those before."""

    number: int
    token_ids: tuple[int, ...]
    num_computed: int
    ticket: KVTicket
    is_last: bool


@dataclass(frozen=True, slots=True)
class Copied:
    """d -> s: all that this stage named lies here."""

    number: int
    stage: int


@dataclass(frozen=True, slots=True)
class Declined:
    """d -> s: no; nothing is held here for it any more."""

    number: int
    reason: DeclineReason


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """s -> d: the request stays, or is gone; let go of what was reserved and copied."""

    number: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """w -> g: the owner asks that ``to`` own the request from here on. It stands still until the answer.

    Repeated until then, so it is the question "did you commit?" as well. The answer is Release (``to`` owns it, or it
    is gone) or Keep. ``number`` is that of the migration which copied its KV; 0 where it has none. The gateway must
    have ``num_output_tokens``, for ``to`` has no log-probabilities of those before.
    """

    request_id: str
    epoch: int
    to: Peer
    number: int
    num_output_tokens: int
    attained: Attained


@dataclass(frozen=True, slots=True)
class Keep:
    """g -> w: the request is not handed over; go on with it."""

    request_id: str
    epoch: int

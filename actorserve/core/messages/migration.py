"""Messages: moving a request from one worker to another (``core.migration``).

``s`` is the source and ``d`` the destination, two workers. Copied, Declined and Withdrawn serve checkpoints as well
(``core.checkpoints``); the transfer's kind tells which of the two a message is about.
"""

from actorserve.core.messages.transfers import DeclineReason, KVTicket, TransferId
from actorserve.core.messages.value import value
from actorserve.core.messages.values import Attained, Energy, Peer, RequestSpec


@value
class MigrateTo:
    """c -> w: for the next ``ttl_s`` move requests to this worker, a few at a time, ``num_bytes`` of KV in all.

    A later MigrateTo replaces this one, and one of 0 bytes cancels it. Migrations in flight go on. ``decoding_only``:
    only requests past their first token may move, because the destination computes no prompts, or because the source
    keeps its own.
    """

    destination: Peer
    num_bytes: int
    ttl_s: float
    decoding_only: bool = False


@value
class Offer:
    """s -> d, the first stage: reserve blocks for this request, and copy the blocks that the ticket names.

    KV exists for the first ``num_computed`` of its tokens, all in the ticket's blocks; or it will, once the ticket's
    iteration has ended. ``is_last``: the request is paused, and no stage follows. ``computing_s``: how long the source
    is expected to compute before this stage's KV is there, or before the next stage.
    """

    epoch: int
    gateway: Peer
    request: RequestSpec
    num_computed: int
    ticket: KVTicket
    is_last: bool
    computing_s: float = 0.0

    @property
    def transfer(self) -> TransferId:
        return self.ticket.transfer


@value
class Stage:
    """s -> d, each further stage: ``token_ids`` are new, and the ticket's blocks follow those of earlier stages.

    The rest is as in Offer. The token that the ticket's iteration makes is not among ``token_ids``.
    """

    token_ids: tuple[int, ...]
    num_computed: int
    ticket: KVTicket
    is_last: bool
    computing_s: float = 0.0

    @property
    def transfer(self) -> TransferId:
        return self.ticket.transfer


@value
class Copied:
    """d -> s: all blocks of this stage are copied."""

    transfer: TransferId
    stage: int


@value
class Declined:
    """d -> s: the destination does not take this stage. If it was a migration's, the destination holds nothing any
    more.
    """

    transfer: TransferId
    reason: DeclineReason


@value
class Withdrawn:
    """s -> d: the source has ended this transfer; free what was reserved and copied for it."""

    transfer: TransferId


@value
class HandOver:
    """w -> g: the owner asks that ``to`` own the request from here on. The request is paused until the answer.

    Repeated until then, because it also asks whether the gateway has committed already. The answer is Release (``to``
    owns the request, or the request is gone) or Keep. ``transfer`` copied its KV to ``to``; None if no KV was copied.
    The gateway must have ``num_output_tokens``, because ``to`` has no log-probabilities of these tokens. ``energy`` is
    what the owner spent on the request; None if it does not know that.
    """

    request_id: str
    epoch: int
    to: Peer
    transfer: TransferId | None
    num_output_tokens: int
    attained: Attained
    energy: Energy | None = None


@value
class Keep:
    """g -> w: the request is not handed over; go on with it."""

    request_id: str
    epoch: int

"""One client's request as its gateway holds it (``core.gateway.state``)."""

from dataclasses import dataclass, field
from enum import Enum, auto

from actorserve.core.messages import Attained, Checkpointed, HandOver, MigrationId, Peer, RequestSpec


class SessionStage(Enum):
    """Where a session's request is."""

    PLACING = auto()  # with the coordinator, or its stand-in; no worker knows this epoch
    STARTING = auto()  # sent to a worker that has not answered
    RUNNING = auto()  # a worker owns it


@dataclass(slots=True)
class Session:
    """One request's life at the gateway.

    Its patience counts from ``patient_from_s``: since it came, lost its owner, or was last served. ``served_at_s`` is
    when it was last served, or came; of the time since then, ``waited_s`` passed under earlier epochs, and ``queued_s``
    in the coordinator's queue under this one.
    """

    spec: RequestSpec
    patient_from_s: float
    served_at_s: float
    retry_at_s: float
    epoch: int = 1
    stage: SessionStage = SessionStage.PLACING
    instance: Peer | None = None
    kind: str = ""  # of the worker that made the tokens so far
    avoid: Peer | None = None
    waited_s: float = 0.0
    attained: Attained = field(default_factory=Attained)  # at the owner that gave it back
    queued_s: float = 0.0
    output: list[int] = field(default_factory=list)
    resend_asked_s: float | None = None
    migration: MigrationId | None = None  # that copied its KV to the owner of this epoch
    handing_over: HandOver | None = None  # asked for by the owner; tokens that it made are still on their way
    checkpointed: Checkpointed | None = None  # who has checkpoints of its KV under this epoch
    prefix_names: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """What must be prefilled: prompt and output so far."""
        return len(self.spec.prompt_token_ids) + len(self.output)

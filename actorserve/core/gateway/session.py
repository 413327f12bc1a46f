"""One client's request, as its gateway holds it (``core.gateway.state``)."""

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Self

from actorserve.core.messages import (
    NOTHING_SPENT,
    Attained,
    Checkpointed,
    Energy,
    HandOver,
    Peer,
    Place,
    RequestSpec,
    Start,
    Transfer,
)
from actorserve.core.placement.prefix_map import prefix_names


class SessionStage(Enum):
    """How far the current epoch of a session has come."""

    PLACING = auto()  # the coordinator or the fallback chooses a worker; no worker knows this epoch
    STARTING = auto()  # Start was sent to a worker that has not answered
    RUNNING = auto()  # a worker owns the request


@dataclass(slots=True)
class Session:
    """One request's life at the gateway.

    The search for a worker is bounded from ``patient_from_s`` on: when the request came, lost its owner, or last got a
    token. ``came_at_s`` is when the request came, and ``served_at_s`` when it last got a token, or came. Of the times
    since then, ``age_s`` and ``waited_s`` passed under earlier epochs, and ``queued_s`` passed in the coordinator's
    queue under this epoch. ``started_s`` is when it was last sent to a worker. The worker of the epoch ``told_epoch``
    was the last one that the client's side was told of. ``energy`` is what earlier owners spent; None: not known.
    """

    spec: RequestSpec
    patient_from_s: float
    came_at_s: float
    served_at_s: float
    retry_at_s: float
    output: list[int]
    prefix_names: tuple[str, ...]
    epoch: int = 1
    stage: SessionStage = SessionStage.PLACING
    instance: Peer | None = None  # the owner; while PLACING, a chosen worker that this gateway has not met
    kind: str = ""  # of the worker that made the tokens so far
    avoid: Peer | None = None
    age_s: float = 0.0
    waited_s: float = 0.0
    attained: Attained = field(default_factory=Attained)  # at the owner that gave the request back
    queued_s: float = 0.0
    started_s: float = 0.0
    energy: Energy | None = NOTHING_SPENT
    told_epoch: int = 0
    resend_requested_s: float | None = None
    transfer: Transfer | None = None  # the transfer that copied the KV to this epoch's owner
    token_instance: Peer | None = None  # where this epoch's owner is to hand the request over to after the prompt
    hand_over: HandOver | None = None  # the owner asked for it, and some of its tokens have not arrived yet
    checkpointed: Checkpointed | None = None  # where checkpoints of this epoch's KV are

    @classmethod
    def opened(cls, spec: RequestSpec, now: float, *, prefix_aware: bool) -> Self:
        """The session of a request that has just come. ``prefix_aware``: instances may have cached prefixes of it."""
        return cls(
            spec,
            patient_from_s=now,
            came_at_s=now,
            served_at_s=now,
            retry_at_s=now,
            output=list(spec.output_token_ids),
            # The log-probabilities of a prompt come from computing all of it, so it gains nothing from cached prefixes.
            prefix_names=prefix_names(spec) if prefix_aware and spec.sampling.prompt_logprobs < 0 else (),
        )

    @property
    def num_tokens(self) -> int:
        """What a worker must prefill: prompt and output so far."""
        return len(self.spec.prompt_token_ids) + len(self.output)

    def begin_epoch(self, now: float) -> None:
        """From now on the request has no owner. It keeps the tokens that its client has."""
        self.epoch += 1
        self.instance = None
        self.resend_requested_s = None
        self.transfer = self.hand_over = self.checkpointed = self.token_instance = None
        self.age_s = now - self.came_at_s
        self.waited_s = now - self.served_at_s

    def set_priority(self, priority: int) -> None:
        """An operator changes the priority. The worker that has the request hears of it from the coordinator."""
        self.spec = replace(self.spec, priority=priority)

    def place_message(self, avoid_once: Peer | None = None) -> Place:
        """The request for a worker. This one message avoids ``avoid_once``; its repeats avoid only ``avoid``."""
        return Place(
            self.spec.request_id,
            self.epoch,
            num_tokens=self.num_tokens,
            priority=self.spec.priority,
            kind=self.kind,
            avoid=avoid_once or self.avoid,
            waited_s=self.waited_s,
            prefix_names=self.prefix_names,
        )

    def start_message(self) -> Start:
        """The request as its next owner needs it: with all output so far, and with its age and its waiting time."""
        spec = replace(self.spec, output_token_ids=tuple(self.output))
        queued_s = self.queued_s
        attained = replace(self.attained, waited_s=self.waited_s + queued_s, age_s=self.age_s + queued_s)
        return Start(self.epoch, spec, attained, self.transfer, self.token_instance)

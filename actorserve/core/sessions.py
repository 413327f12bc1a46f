"""The gateway's sessions: each owns one client's stream, issues its request's epochs, and outlives its workers.

A session asks the coordinator for a place, starts its request there, and takes the tokens. When the owner dies, it
begins a new epoch and has the request carried on elsewhere from the tokens it holds. Epochs are issued here and
nowhere else, so at any time at most one (instance, epoch) is current; output of any other is dropped, and its sender
is told to release it.

Every message to a peer may be lost: what is not answered is sent again after ``retry_s``, and all of them may be
repeated without harm.
"""

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from actorserve.core.effects import Available, Deliver, Effect, End, Send
from actorserve.core.messages import (
    LOCAL,
    Close,
    Finished,
    FinishReason,
    LoadReport,
    Message,
    Open,
    Peer,
    PeerDown,
    PeerUp,
    Place,
    Placed,
    RefusalReason,
    Refused,
    Release,
    RequestSpec,
    Resend,
    Role,
    Start,
    Started,
    Tick,
    TokenLogprobs,
    Tokens,
    Unplace,
)


class Stage(Enum):
    """Where a session's request is."""

    PLACING = auto()  # with the coordinator; no worker knows this epoch
    STARTING = auto()  # sent to a worker that has not answered
    RUNNING = auto()  # a worker owns it


@dataclass(slots=True)
class Session:
    """One request's life at the gateway."""

    spec: RequestSpec
    placing_since_s: float
    retry_at_s: float
    epoch: int = 1
    stage: Stage = Stage.PLACING
    instance: Peer | None = None
    kind: str = ""  # of the worker that made the tokens so far
    avoid: Peer | None = None
    output: list[int] = field(default_factory=list)
    resend_asked_s: float | None = None


@dataclass(frozen=True, slots=True)
class SessionsConfig:
    retry_s: float
    no_instance_timeout_s: float
    resume_timeout_s: float

    @property
    def retry_slack_s(self) -> float:
        """Retries that come due this soon go along, so that thousands that wait cost a few ticks and not thousands."""
        return self.retry_s / 8


class SessionsState:
    """The pure state machine of a gateway: all of its sessions."""

    def __init__(self, config: SessionsConfig) -> None:
        self.config = config
        self.sessions: dict[str, Session] = {}
        self.coordinator: Peer | None = None
        self.workers: dict[Peer, PeerUp] = {}
        self.loads: dict[Peer, LoadReport] = {}
        self.num_stale_messages = 0
        self.num_failovers = 0
        self._said_available = False
        self._next_tick_s: float | None = None

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        """Take one message (local ones have no sender), and return what is to be done, in order."""
        sender = sender or LOCAL
        effects: list[Effect] = []
        match message:
            case Tokens():
                self._on_tokens(message, sender, now, effects)
            case Finished():
                self._on_finished(message, sender, now, effects)
            case Open(request=spec):
                opened = Session(spec, placing_since_s=now, retry_at_s=now, output=list(spec.output_token_ids))
                self.sessions[spec.request_id] = opened
                self._place(opened, now, effects)
            case Close(request_id=request_id):
                self._on_close(request_id, effects)
            case Placed():
                self._on_placed(message, sender, now, effects)
            case Started(request_id=request_id, epoch=epoch):
                session = self._current(request_id, epoch, sender, effects)
                if session is not None and session.stage is Stage.STARTING:
                    session.stage = Stage.RUNNING
            case Refused():
                self._on_refused(message, sender, now, effects)
            case LoadReport():
                self.loads[sender] = message
            case PeerUp():
                self._on_peer_up(message, now, effects)
            case PeerDown(peer=peer):
                self._on_peer_down(peer, now, effects)
            case Tick():
                self._on_tick(now, effects)
            case _:
                self.num_stale_messages += 1
        return effects

    def next_deadline(self) -> float | None:
        """When to send the next Tick, in seconds on the shell's clock."""
        return self._next_tick_s

    # --- finding an owner --------------------------------------------------------------------------------------------

    def _place(self, session: Session, now: float, effects: list[Effect]) -> None:
        """(Re)ask for a place. With the coordinator gone, wait: its next incarnation is asked at once."""
        session.stage = Stage.PLACING
        self._retry_later(session, now)
        if self.coordinator is not None:
            effects.append(
                Send(
                    self.coordinator,
                    Place(
                        session.spec.request_id,
                        session.epoch,
                        num_tokens=len(session.spec.prompt_token_ids) + len(session.output),
                        priority=session.spec.priority,
                        kind=session.kind,
                        avoid=session.avoid,
                    ),
                )
            )

    def _on_placed(self, message: Placed, sender: Peer, now: float, effects: list[Effect]) -> None:
        session = self.sessions.get(message.request_id)
        if session is None or session.epoch != message.epoch:
            self.num_stale_messages += 1
            effects.append(Send(sender, Unplace(message.request_id, message.epoch)))
            return
        if session.stage is not Stage.PLACING:
            return  # a repeated answer
        session.instance = message.instance
        if message.instance in self.workers:
            self._start(session, now, effects)
        # Else this gateway has not met that worker yet (its PeerUp starts the request), or knows it dead before the
        # coordinator does (the next retry asks again, and finds it gone).

    def _start(self, session: Session, now: float, effects: list[Effect]) -> None:
        assert session.instance is not None
        session.stage = Stage.STARTING
        self._retry_later(session, now)
        spec = replace(session.spec, output_token_ids=tuple(session.output))
        effects.append(Send(session.instance, Start(session.epoch, spec)))

    def _retry_later(self, session: Session, now: float) -> None:
        session.retry_at_s = now + self.config.retry_s
        if self._next_tick_s is None:
            self._next_tick_s = session.retry_at_s

    def _fail_over(self, session: Session, now: float, effects: list[Effect]) -> None:
        """Begin a new epoch elsewhere, from the tokens that the client has."""
        self.num_failovers += 1
        session.epoch += 1
        session.avoid = session.instance
        session.instance = None
        session.resend_asked_s = None
        session.placing_since_s = now
        self._place(session, now, effects)

    # --- what the owner says -----------------------------------------------------------------------------------------

    def _current(self, request_id: str, epoch: int, sender: Peer, effects: list[Effect]) -> Session | None:
        """The session that ``sender`` speaks of, if it owns it; else the sender is told to let go."""
        session = self.sessions.get(request_id)
        if session is not None and session.epoch == epoch and session.instance == sender:
            return session
        self.num_stale_messages += 1
        effects.append(Send(sender, Release(request_id, epoch)))
        return None

    def _on_tokens(self, message: Tokens, sender: Peer, now: float, effects: list[Effect]) -> None:
        fresh: dict[str, tuple[list[int], list[TokenLogprobs | None]]] = {}
        num_cached: dict[str, int] = {}
        for row, request_id in enumerate(message.request_ids):
            session = self._current(request_id, message.epochs[row], sender, effects)
            if session is None:
                continue
            session.stage = Stage.RUNNING
            position = message.positions[row]
            if position == len(session.output):
                session.output.append(message.token_ids[row])
                session.resend_asked_s = None
                token_ids, logprobs = fresh.setdefault(request_id, ([], []))
                token_ids.append(message.token_ids[row])
                if message.logprobs:
                    logprobs.append(message.logprobs[row])
                if message.num_cached_tokens:
                    num_cached.setdefault(request_id, message.num_cached_tokens[row])
                session.kind = self.workers[sender].kind
            elif position > len(session.output):
                self._ask_resend(session, now, effects)
        for request_id, (token_ids, logprobs) in fresh.items():
            effects.append(Deliver(request_id, tuple(token_ids), tuple(logprobs), num_cached.get(request_id, 0)))

    def _ask_resend(self, session: Session, now: float, effects: list[Effect]) -> None:
        """Ask for what is missing, once a ``retry_s``: every token until it comes would ask again."""
        assert session.instance is not None
        if session.resend_asked_s is None or now >= session.resend_asked_s + self.config.retry_s:
            session.resend_asked_s = now
            effects.append(Send(session.instance, Resend(session.spec.request_id, session.epoch, len(session.output))))

    def _on_finished(self, message: Finished, sender: Peer, now: float, effects: list[Effect]) -> None:
        session = self._current(message.request_id, message.epoch, sender, effects)
        if session is None:
            return
        if message.num_output_tokens > len(session.output):
            session.stage = Stage.RUNNING
            self._ask_resend(session, now, effects)
            return
        del self.sessions[message.request_id]
        effects.append(Send(sender, Release(message.request_id, message.epoch)))
        effects.append(End(message.request_id, message.reason))

    def _on_refused(self, message: Refused, sender: Peer, now: float, effects: list[Effect]) -> None:
        session = self.sessions.get(message.request_id)
        if session is None or session.epoch != message.epoch or session.stage is Stage.RUNNING:
            self.num_stale_messages += 1
            return
        match message.reason:
            case RefusalReason.DRAINING:
                self._fail_over(session, now, effects)
            case RefusalReason.OVERLOADED | RefusalReason.TOO_LARGE if session.output:
                pass  # its client has half an answer: the next retry asks again, and may find a larger instance back
            case _:
                self._end_with_refusal(session, message.reason, message.retry_after_s, effects)

    def _patience_s(self, session: Session) -> float:
        """How long to look for an instance. Who has half an answer rather waits for a worker to load its model."""
        return self.config.resume_timeout_s if session.output else self.config.no_instance_timeout_s

    def _end_with_refusal(
        self, session: Session, reason: RefusalReason, retry_after_s: float, effects: list[Effect]
    ) -> None:
        del self.sessions[session.spec.request_id]
        effects.append(End(session.spec.request_id, FinishReason.ERROR, reason, retry_after_s))

    # --- clients and peers come and go -------------------------------------------------------------------------------

    def _on_close(self, request_id: str, effects: list[Effect]) -> None:
        session = self.sessions.pop(request_id, None)
        if session is None:
            return
        if session.stage is not Stage.RUNNING and self.coordinator is not None:
            effects.append(Send(self.coordinator, Unplace(request_id, session.epoch)))
        if session.stage is not Stage.PLACING and session.instance is not None:
            effects.append(Send(session.instance, Release(request_id, session.epoch)))

    def _on_peer_up(self, message: PeerUp, now: float, effects: list[Effect]) -> None:
        if message.role is Role.COORDINATOR:
            self.coordinator = message.peer
            for session in self.sessions.values():
                if session.stage is Stage.PLACING:
                    self._place(session, now, effects)
        elif message.role is Role.WORKER:
            if not self._said_available:
                self._said_available = True
                effects.append(Available())
            self.workers[message.peer] = message
            for session in self.sessions.values():
                if session.avoid == message.peer:
                    # Not dead after all (it was we who were fenced): it may be the only one there is.
                    session.avoid = None
                    if session.stage is Stage.PLACING and session.instance is None:
                        self._place(session, now, effects)
                if session.stage is Stage.PLACING and session.instance == message.peer:
                    self._start(session, now, effects)

    def _on_peer_down(self, peer: Peer, now: float, effects: list[Effect]) -> None:
        if peer == self.coordinator:
            self.coordinator = None
        self.loads.pop(peer, None)
        if self.workers.pop(peer, None) is not None:
            for session in self.sessions.values():
                if session.instance == peer:
                    self._fail_over(session, now, effects)

    def _on_tick(self, now: float, effects: list[Effect]) -> None:
        for session in list(self.sessions.values()):
            if session.stage is Stage.RUNNING or now < session.retry_at_s - self.config.retry_slack_s:
                continue
            if session.stage is Stage.STARTING:
                self._start(session, now, effects)
            elif now >= session.placing_since_s + self._patience_s(session):
                if self.coordinator is not None:
                    effects.append(Send(self.coordinator, Unplace(session.spec.request_id, session.epoch)))
                self._end_with_refusal(session, RefusalReason.NO_INSTANCE, self.config.retry_s, effects)
            else:
                self._place(session, now, effects)
        retries = (session.retry_at_s for session in self.sessions.values() if session.stage is not Stage.RUNNING)
        self._next_tick_s = min(retries, default=None)

"""The gateway's sessions: each owns one client's stream, issues its request's epochs, and outlives its workers.

A session asks the coordinator for a place, starts its request there, and takes the tokens. While the coordinator is
gone the gateway places by itself (``core.gateway.fallback``). When the owner dies, the session begins a new epoch and
has the request carried on elsewhere from the tokens it holds. Epochs are issued here and nowhere else, so at any time
at most one (instance, epoch) is current; output of any other is dropped, and its sender is told to release it.

A worker may refuse what it was given: it drains, or others took the memory that the request needs. That too means a new
epoch and another place, within the request's patience. What the coordinator refuses ends a request that has no output.

Or it hands a request over to another worker, which may hold a copy of its KV (``core.migration.source``). The session
alone commits that, by the new epoch: the owner asks, stands still, and is told either to let go or to keep the request,
each time that it asks. So no message that is lost or late, and nobody's death, can leave two owners or none.

What a request attained at a worker goes with it where that gives it back, and is gone where that dies. Then it begins
at the next as a newcomer with a longer prompt, but with the time that it has waited since it last got a token, so that
a feedback queue promotes it no later for its bad luck.

Every message to a peer may be lost: what is not answered is sent again after ``retry_s``, and all of them may be
repeated without harm.
"""

from dataclasses import replace
from math import inf

from actorserve.core.cluster.queue import MAX_RETRY_AFTER_S
from actorserve.core.effects import Available, Deliver, Effect, End, Send
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.gateway.fallback import FallbackPlacer
from actorserve.core.gateway.session import Session, SessionStage
from actorserve.core.messages import (
    LOCAL,
    Attained,
    Checkpointed,
    Close,
    Finished,
    FinishReason,
    HandOver,
    Keep,
    LoadReport,
    Message,
    MigrationId,
    Open,
    Peer,
    PeerDown,
    PeerUp,
    Place,
    Placed,
    RefusalReason,
    Refused,
    Release,
    Resend,
    Role,
    Start,
    Started,
    Tick,
    TokenLogprobs,
    Tokens,
    Unplace,
    WorkerInfo,
)
from actorserve.core.placement.prefix_map import prefix_names


class GatewayState:
    """The pure state machine of a gateway: all of its sessions."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.sessions: dict[str, Session] = {}
        self.coordinator: Peer | None = None
        self.fallback: FallbackPlacer | None = None  # while the coordinator is gone, or did not come
        self.workers: dict[Peer, WorkerInfo] = {}
        self.loads: dict[Peer, LoadReport] = {}
        self.num_stale_messages = 0
        self.num_failovers = 0
        self.num_handed_over = 0
        self.num_placed_here = 0  # by the stand-in
        self._said_available = False
        self._shortest_waiting = inf  # tokens: no session that the stand-in found no place for is shorter
        self._may_look_at_s = -inf  # when it looks through all sessions that wait again
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
                opened = Session(
                    spec,
                    patient_from_s=now,
                    served_at_s=now,
                    retry_at_s=now,
                    output=list(spec.output_token_ids),
                    prefix_names=prefix_names(spec),
                )
                self.sessions[spec.request_id] = opened
                self._place(opened, now, effects)
            case Close(request_id=request_id):
                self._on_close(request_id, effects)
            case Placed():
                self._on_placed(message, sender, now, effects)
            case Started(request_id=request_id, epoch=epoch):
                session = self._current(request_id, epoch, sender, effects)
                if session is not None and session.stage is SessionStage.STARTING:
                    session.stage = SessionStage.RUNNING
            case Refused():
                self._on_refused(message, sender, now, effects)
            case HandOver(request_id=request_id, epoch=epoch):
                session = self._current(request_id, epoch, sender, effects)
                if session is not None:
                    session.stage = SessionStage.RUNNING
                    session.handing_over = message
                    self._hand_over(session, now, effects)
            case Checkpointed(request_id=request_id, epoch=epoch):
                session = self._current(request_id, epoch, sender, effects)
                if session is not None:
                    session.checkpointed = message
            case LoadReport():
                self._on_load_report(message, sender, now, effects)
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

    def _place(self, session: Session, now: float, effects: list[Effect], not_now: Peer | None = None) -> None:
        """(Re)ask for a place. With the coordinator gone, whoever finds none here asks its next incarnation at once.

        ``not_now`` is avoided by this question alone, ``session.avoid`` by those that repeat it too.
        """
        session.stage = SessionStage.PLACING
        self._retry_later(session, now)
        if self.coordinator is not None:
            effects.append(Send(self.coordinator, self._question(session, not_now)))
        elif self.fallback is not None:
            self._ask(self.fallback, session, now, effects, not_now)

    def _question(self, session: Session, not_now: Peer | None = None) -> Place:
        return Place(
            session.spec.request_id,
            session.epoch,
            num_tokens=session.num_tokens,
            priority=session.spec.priority,
            kind=session.kind,
            avoid=not_now or session.avoid,
            waited_s=session.waited_s,
            prefix_names=session.prefix_names,
        )

    def _on_placed(self, message: Placed, sender: Peer, now: float, effects: list[Effect]) -> None:
        session = self.sessions.get(message.request_id)
        if session is None or session.epoch != message.epoch:
            self.num_stale_messages += 1
            effects.append(Send(sender, Unplace(message.request_id, message.epoch)))
            return
        if session.stage is not SessionStage.PLACING:
            if session.instance != message.instance:
                # It was placed elsewhere before. (Else the answer is only repeated.)
                effects.append(Send(sender, Unplace(message.request_id, message.epoch)))
            return
        session.instance = message.instance
        session.queued_s = message.waited_s
        if message.instance in self.workers:
            self._start(session, now, effects)
        # Else this gateway has not met that worker yet (its PeerUp starts the request), or knows it dead before the
        # coordinator does (the next retry asks again, and finds it gone).

    def _ask(
        self, fallback: FallbackPlacer, session: Session, now: float, effects: list[Effect], not_now: Peer | None = None
    ) -> None:
        """Start the request wherever the stand-in has room for it, under the epoch that no worker knows yet.

        One that no worker can ever hold ends, as with the coordinator; not where its client has half an answer.
        """
        largest_tokens = fallback.largest_tokens
        if largest_tokens is not None and session.num_tokens > largest_tokens and not session.output:
            self._end_with_refusal(session, RefusalReason.TOO_LARGE, self.config.retry_s, effects)
            return
        instance = fallback.place(self._question(session, not_now), now)
        if instance is None:
            self._shortest_waiting = min(self._shortest_waiting, session.num_tokens)
        else:
            self.num_placed_here += 1
            session.instance = instance
            session.queued_s = now - session.served_at_s - session.waited_s
            self._start(session, now, effects)

    def _place_waiting(self, fallback: FallbackPlacer, now: float, effects: list[Effect]) -> None:
        """Give what room there may be to those who wait, the most urgent first and then the earliest.

        To look through thousands that wait costs, so that is done only where one of them may fit, and not at each of
        the reports that come at nearly the same time. Who is passed over by that has the next report, and its retry.
        """
        if now < self._may_look_at_s or fallback.room_tokens < self._shortest_waiting:
            return
        self._shortest_waiting = inf
        waiting = [session for session in self.sessions.values() if session.stage is SessionStage.PLACING]
        if waiting:
            self._may_look_at_s = now + self.config.retry_slack_s
        for session in sorted(waiting, key=lambda session: session.spec.priority):
            if session.num_tokens <= fallback.room_tokens:
                self._ask(fallback, session, now, effects)
            else:
                self._shortest_waiting = min(self._shortest_waiting, session.num_tokens)

    def _begin_to_stand_in(self, now: float, effects: list[Effect]) -> None:
        config = self.config
        self.fallback = FallbackPlacer(
            self.workers, self.loads, config.max_queue_per_instance, config.placement_ttl_s, now
        )
        self._shortest_waiting = self._may_look_at_s = -inf
        self._place_waiting(self.fallback, now, effects)

    def _start(self, session: Session, now: float, effects: list[Effect]) -> None:
        assert session.instance is not None
        session.stage = SessionStage.STARTING
        self._retry_later(session, now)
        spec = replace(session.spec, output_token_ids=tuple(session.output))
        attained = replace(session.attained, waited_s=session.waited_s + session.queued_s)
        effects.append(Send(session.instance, Start(session.epoch, spec, attained, session.migration)))

    def _retry_later(self, session: Session, now: float) -> None:
        session.retry_at_s = now + self.config.retry_s
        if self._next_tick_s is None:
            self._next_tick_s = session.retry_at_s

    def _fail_over(self, session: Session, now: float, effects: list[Effect]) -> None:
        """The owner is lost: have the request carried on, best where checkpoints of its KV are, with new patience."""
        self.num_failovers += 1
        lost, checkpointed = session.instance, session.checkpointed
        session.avoid = lost
        session.patient_from_s = now
        self._begin_epoch(session, now)
        if lost is not None and checkpointed is not None and checkpointed.holder in self.workers:
            session.instance = checkpointed.holder
            session.queued_s = 0.0
            session.migration = MigrationId(lost, checkpointed.number)
            self._start(session, now, effects)
        else:
            self._place(session, now, effects)

    def _begin_epoch(self, session: Session, now: float) -> None:
        """From here on the request has no owner, and the tokens that its client has."""
        session.epoch += 1
        session.instance = None
        session.resend_asked_s = None
        session.migration = session.handing_over = session.checkpointed = None
        session.waited_s = now - session.served_at_s

    def _hand_over(self, session: Session, now: float, effects: list[Effect]) -> None:
        """Commit what the owner asked for, or have it keep the request; once all of its tokens are here."""
        asked, owner = session.handing_over, session.instance
        assert asked is not None
        assert owner is not None
        load = self.loads.get(asked.to)
        if asked.to not in self.workers or (load is not None and load.draining):
            session.handing_over = None
            effects.append(Send(owner, Keep(asked.request_id, asked.epoch)))
        elif asked.num_output_tokens > len(session.output):
            self._ask_resend(session, now, effects)
        else:
            self.num_handed_over += 1
            self._begin_epoch(session, now)
            session.instance = asked.to
            session.attained = asked.attained
            session.queued_s = 0.0
            session.migration = MigrationId(owner, asked.number) if asked.number else None
            self._start(session, now, effects)
            effects.append(Send(owner, Release(asked.request_id, asked.epoch)))

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
        request_ids, epochs, positions = message.request_ids, message.epochs, message.positions
        end = 0
        while (row := end) < len(request_ids):
            request_id, epoch, position = request_ids[row], epochs[row], positions[row]
            # A request's rows mostly stand one by one, but for what is sent again and what a simulator sends at once.
            end = row + 1
            while end < len(request_ids) and request_ids[end] == request_id and epochs[end] == epoch:
                if positions[end] != position + end - row:
                    break
                end += 1
            session = self._current(request_id, epoch, sender, effects)
            if session is None:
                continue
            session.stage = SessionStage.RUNNING
            first = row + len(session.output) - position  # the row of the next token that is missing
            if first < row:
                self._ask_resend(session, now, effects)
            elif first < end:
                session.output += message.token_ids[first:end]
                session.served_at_s = session.patient_from_s = now
                session.resend_asked_s = None
                token_ids, logprobs = fresh.setdefault(request_id, ([], []))
                token_ids += message.token_ids[first:end]
                logprobs += message.logprobs[first:end]
                if message.num_cached_tokens:
                    num_cached.setdefault(request_id, message.num_cached_tokens[first])
                session.kind = self.workers[sender].kind
                if session.handing_over is not None:
                    self._hand_over(session, now, effects)
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
            session.stage = SessionStage.RUNNING
            self._ask_resend(session, now, effects)
            return
        del self.sessions[message.request_id]
        effects.append(Send(sender, Release(message.request_id, message.epoch)))
        effects.append(End(message.request_id, message.reason))

    def _on_refused(self, message: Refused, sender: Peer, now: float, effects: list[Effect]) -> None:
        if sender in self.workers:
            session = self._current(message.request_id, message.epoch, sender, effects)
            if session is not None:
                self._on_refused_by_owner(session, message, now, effects)
            return
        session = self.sessions.get(message.request_id)
        if session is None or session.epoch != message.epoch or session.stage is not SessionStage.PLACING:
            self.num_stale_messages += 1
        elif not session.output:
            self._end_with_refusal(session, message.reason, message.retry_after_s, effects)
        # Else its client has half an answer: the next retry asks again, and may find room, or a larger instance back.

    def _on_refused_by_owner(self, session: Session, message: Refused, now: float, effects: list[Effect]) -> None:
        """The owner gives the request up, whether it ran there or not, and says so until it is released."""
        assert session.instance is not None
        owner = session.instance
        effects.append(Send(owner, Release(session.spec.request_id, session.epoch)))
        match message.reason:
            case RefusalReason.DRAINING:
                self._fail_over(session, now, effects)
            case RefusalReason.TOO_LARGE if not session.output:
                self._end_with_refusal(session, message.reason, message.retry_after_s, effects)
            case _:
                session.attained = message.attained
                # The coordinator may not know yet that it has no room: ask for another now, for any from the retry on.
                self._begin_epoch(session, now)
                self._place(session, now, effects, not_now=owner)

    def _patience_s(self, session: Session) -> float:
        """How long to look for an instance. Who has half an answer rather waits for a worker to load its model."""
        return self.config.resume_timeout_s if session.output else self.config.no_instance_timeout_s

    def _give_up(self, session: Session, now: float, effects: list[Effect]) -> None:
        """Its patience is over. Where workers are there to be given work, they are busy."""
        reason, retry_after_s = RefusalReason.NO_INSTANCE, self.config.retry_s
        if self.coordinator is not None:
            effects.append(Send(self.coordinator, Unplace(session.spec.request_id, session.epoch)))
        if any(peer not in self.loads or not self.loads[peer].draining for peer in self.workers):
            # The queue takes at least as long as was waited here in vain; more is not known.
            reason, retry_after_s = RefusalReason.OVERLOADED, min(now - session.patient_from_s, MAX_RETRY_AFTER_S)
        self._end_with_refusal(session, reason, retry_after_s, effects)

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
        if session.stage is not SessionStage.RUNNING and self.coordinator is not None:
            effects.append(Send(self.coordinator, Unplace(request_id, session.epoch)))
        if session.stage is not SessionStage.PLACING and session.instance is not None:
            effects.append(Send(session.instance, Release(request_id, session.epoch)))

    def _on_peer_up(self, message: PeerUp, now: float, effects: list[Effect]) -> None:
        if message.role is Role.COORDINATOR:
            self.coordinator, self.fallback = message.peer, None
            for session in self.sessions.values():
                if session.stage is SessionStage.PLACING:
                    self._place(session, now, effects)
        elif message.worker is not None:
            if not self._said_available:
                self._said_available = True
                effects.append(Available())
            self.workers[message.peer] = message.worker
            if self.fallback is not None:
                self.fallback.meet(message.peer, message.worker)
            for session in list(self.sessions.values()):
                if session.avoid == message.peer:
                    # Not dead after all (it was we who were fenced): it may be the only one there is.
                    session.avoid = None
                    if session.stage is SessionStage.PLACING and session.instance is None:
                        self._place(session, now, effects)
                if session.stage is SessionStage.PLACING and session.instance == message.peer:
                    self._start(session, now, effects)

    def _on_peer_down(self, peer: Peer, now: float, effects: list[Effect]) -> None:
        self.loads.pop(peer, None)
        if peer == self.coordinator:
            self.coordinator = None
            self._begin_to_stand_in(now, effects)
        if self.fallback is not None:
            self.fallback.lose(peer)
        if self.workers.pop(peer, None) is not None:
            for session in list(self.sessions.values()):
                if session.instance == peer:
                    session.attained = Attained()
                    self._fail_over(session, now, effects)

    def _on_load_report(self, report: LoadReport, sender: Peer, now: float, effects: list[Effect]) -> None:
        self.loads[sender] = report
        if self.fallback is not None:
            self.fallback.on_report(sender, report, now)
            self._place_waiting(self.fallback, now, effects)

    def _on_tick(self, now: float, effects: list[Effect]) -> None:
        if self.coordinator is None and self.fallback is None:
            # None was met yet, and somebody has waited for it for ``retry_s``.
            self._begin_to_stand_in(now, effects)
        for session in list(self.sessions.values()):
            if session.stage is SessionStage.RUNNING or now < session.retry_at_s - self.config.retry_slack_s:
                continue
            if session.stage is SessionStage.STARTING:
                self._start(session, now, effects)
            elif now >= session.patient_from_s + self._patience_s(session):
                self._give_up(session, now, effects)
            else:
                self._place(session, now, effects)
        retries = (
            session.retry_at_s for session in self.sessions.values() if session.stage is not SessionStage.RUNNING
        )
        self._next_tick_s = min(retries, default=None)

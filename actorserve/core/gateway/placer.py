"""Finding an owner for a session that has none: place the request, start it, retry, and give up in the end."""

from collections.abc import Iterable

from actorserve.core.cluster.queue import MAX_RETRY_AFTER_S
from actorserve.core.effects import Effect, End, Send
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.gateway.counts import GatewayCounts
from actorserve.core.gateway.fallback import FallbackPlacer
from actorserve.core.gateway.peers import KnownPeers
from actorserve.core.gateway.session import Session, SessionStage
from actorserve.core.messages import (
    FinishReason,
    LoadReport,
    Peer,
    Placed,
    RefusalReason,
    Refused,
    Transfer,
    Unplace,
    WantReports,
    WorkerInfo,
)
from actorserve.core.operations.request_log import RequestLog


class SessionPlacer:
    """Asks the coordinator, or the fallback while the coordinator is gone, and starts requests on workers.

    It shares ``sessions``, ``peers`` and ``counts`` with the gateway's state.
    """

    def __init__(
        self,
        config: GatewayConfig,
        sessions: dict[str, Session],
        peers: KnownPeers,
        counts: GatewayCounts,
        log: RequestLog,
    ) -> None:
        self.fallback: FallbackPlacer | None = None  # while no coordinator is up
        self.next_tick_s: float | None = None  # not later than any session's retry
        self._config = config
        self._sessions = sessions
        self._peers = peers
        self._counts = counts
        self._log = log

    # --- placing and starting ----------------------------------------------------------------------------------------

    def place(self, session: Session, now: float, effects: list[Effect], avoid_once: Peer | None = None) -> None:
        """Ask for a worker, for the first time or again. The next coordinator is asked as soon as it comes up.

        ``avoid_once`` is avoided by this attempt alone, ``session.avoid`` by its repeats as well.
        """
        session.stage = SessionStage.PLACING
        self._retry_later(session, now)
        if self._peers.coordinator is not None:
            effects.append(Send(self._peers.coordinator, session.place_message(avoid_once)))
        elif self.fallback is not None:
            self._place_by_fallback(self.fallback, session, now, effects, avoid_once)

    def start(self, session: Session, now: float, effects: list[Effect]) -> None:
        """Send the request to the session's instance, for the first time or again."""
        assert session.instance is not None
        session.stage = SessionStage.STARTING
        session.started_s = now
        self._retry_later(session, now)
        effects.append(Send(session.instance, session.start_message()))

    def fail_over(self, session: Session, now: float, effects: list[Effect]) -> None:
        """The owner is lost: continue elsewhere with new patience, preferably where checkpoints of the KV are."""
        self._counts.num_failovers += 1
        where = "" if session.instance is None else session.instance.name
        self._log.note(session.spec.request_id, now, "lost its worker", where)
        lost, checkpointed = session.instance, session.checkpointed
        copy: Transfer | None = None
        if lost is not None and checkpointed is not None and checkpointed.holder in self._peers.workers:
            copy = Transfer(lost, checkpointed.transfer)
            self.unplace(session, effects)  # no Place follows
        session.avoid = lost
        session.patient_from_s = now
        session.begin_epoch(now)
        if copy is not None and checkpointed is not None:
            session.instance = checkpointed.holder
            session.queued_s = 0.0
            session.transfer = copy
            self.start(session, now, effects)
        else:
            self.place(session, now, effects)

    def unplace(self, session: Session, effects: list[Effect]) -> None:
        """The request ends, or begins an epoch elsewhere. Have the dispatcher forget it, if that may still count the
        request at the instance that it chose, or at a token instance that the request has not reached yet.
        """
        if session.stage is SessionStage.RUNNING and session.token_instance is None:
            return
        if self._peers.coordinator is not None:
            effects.append(Send(self._peers.coordinator, Unplace(session.spec.request_id, session.epoch)))
        elif self.fallback is not None:
            self.fallback.forget(session.spec.request_id, session.epoch)

    def refuse(
        self, session: Session, reason: RefusalReason, retry_after_s: float, now: float, effects: list[Effect]
    ) -> None:
        """End the request with an error that tells the client why, and when to come back."""
        del self._sessions[session.spec.request_id]
        self._log.note(session.spec.request_id, now, "refused", reason.value)
        effects.append(End(session.spec.request_id, FinishReason.ERROR, reason, retry_after_s))

    def on_tick(self, now: float, effects: list[Effect]) -> None:
        """Repeat what was not answered for ``retry_s``, and give up requests whose patience is over."""
        if self._peers.coordinator is None and self.fallback is None:
            # This gateway has never met a coordinator, and a request has waited for one for ``retry_s``.
            self._begin_fallback(now, effects)
        elif self.fallback is not None:
            self._want_reports(self.fallback.unheard(now), effects)  # what was asked before may have been lost
        for session in list(self._sessions.values()):
            if session.stage is SessionStage.RUNNING or now < session.retry_at_s - self._config.retry_slack_s:
                continue
            if session.stage is SessionStage.STARTING:
                self.start(session, now, effects)
            elif now >= session.patient_from_s + self._patience_s(session):
                self._give_up(session, now, effects)
            else:
                self.place(session, now, effects)
        retries = (
            session.retry_at_s for session in self._sessions.values() if session.stage is not SessionStage.RUNNING
        )
        self.next_tick_s = min(retries, default=None)

    def _retry_later(self, session: Session, now: float) -> None:
        session.retry_at_s = now + self._config.retry_s
        if self.next_tick_s is None:
            self.next_tick_s = session.retry_at_s

    def _patience_s(self, session: Session) -> float:
        """How long to search for a worker. Longer once the client has output: a worker may have to load its model."""
        return self._config.resume_timeout_s if session.output else self._config.no_instance_timeout_s

    def _give_up(self, session: Session, now: float, effects: list[Effect]) -> None:
        """The session's patience is over. If a worker accepts requests at all, the reason is overload."""
        reason, retry_after_s = RefusalReason.NO_INSTANCE, self._config.retry_s
        self.unplace(session, effects)
        if any(self._peers.accepts_requests(worker) for worker in self._peers.workers):
            # The queue takes at least as long as this request has waited; more is not known.
            reason, retry_after_s = RefusalReason.OVERLOADED, min(now - session.patient_from_s, MAX_RETRY_AFTER_S)
        self.refuse(session, reason, retry_after_s, now, effects)

    # --- the coordinator's answers -----------------------------------------------------------------------------------

    def on_placed(self, message: Placed, sender: Peer, now: float, effects: list[Effect]) -> None:
        session = self._sessions.get(message.request_id)
        if session is None or session.epoch != message.epoch:
            self._counts.num_stale_messages += 1
            effects.append(Send(sender, Unplace(message.request_id, message.epoch)))
            return
        if session.stage is not SessionStage.PLACING:
            if session.instance != message.instance:
                # The request has another instance already. (The same instance means a repeated answer.)
                effects.append(Send(sender, Unplace(message.request_id, message.epoch)))
            return
        session.instance, session.token_instance = message.instance, message.token_instance
        session.queued_s = message.waited_s
        waited = f"{_names(message)}, after {message.waited_s:.3f} s in the cluster's queue"
        self._log.note(message.request_id, now, "placed", waited)
        if message.instance in self._peers.workers:
            self.start(session, now, effects)
        # Otherwise this gateway has not met the worker yet, and its PeerUp starts the request. Or the gateway knows of
        # the worker's death before the coordinator does; then the coordinator knows it by the next retry.

    def on_refused(self, message: Refused, now: float, effects: list[Effect]) -> None:
        """The coordinator refuses the request."""
        session = self._sessions.get(message.request_id)
        if session is None or session.epoch != message.epoch or session.stage is not SessionStage.PLACING:
            self._counts.num_stale_messages += 1
        elif not session.output:
            self.refuse(session, message.reason, message.retry_after_s, now, effects)
        # The client of a session with output has half an answer: the next retry may find room, or a larger instance.

    # --- peers come and go -------------------------------------------------------------------------------------------

    def on_coordinator_up(self, now: float, effects: list[Effect]) -> None:
        if self.fallback is not None:
            self.fallback = None
            effects += [Send(worker, WantReports(False)) for worker in self._peers.workers]
        for session in self._sessions.values():
            if session.stage is SessionStage.PLACING:
                self.place(session, now, effects)

    def on_coordinator_down(self, now: float, effects: list[Effect]) -> None:
        self._begin_fallback(now, effects)

    def on_worker_up(self, peer: Peer, worker: WorkerInfo, now: float, effects: list[Effect]) -> None:
        if self.fallback is not None:
            self.fallback.add_worker(peer, worker)
            self._want_reports([peer], effects)
        for session in list(self._sessions.values()):
            if session.avoid == peer:
                # The worker was never dead: it was this gateway that was fenced. It may be the only worker there is.
                session.avoid = None
                if session.stage is SessionStage.PLACING and session.instance is None:
                    self.place(session, now, effects)
            if session.stage is SessionStage.PLACING and session.instance == peer:
                self.start(session, now, effects)

    def on_load_report(self, worker: Peer, report: LoadReport, now: float, effects: list[Effect]) -> None:
        if self.fallback is not None:
            self.fallback.on_report(worker, report, now)
            self._place_waiting(self.fallback, now, effects)
        elif self._peers.coordinator is not None:
            effects.append(Send(worker, WantReports(False)))  # the first may have been lost

    # --- without a coordinator ---------------------------------------------------------------------------------------

    def _begin_fallback(self, now: float, effects: list[Effect]) -> None:
        self.fallback = FallbackPlacer(self._config, self._peers, now)
        self._want_reports(self._peers.workers, effects)
        self._place_waiting(self.fallback, now, effects)

    def _want_reports(self, workers: Iterable[Peer], effects: list[Effect]) -> None:
        effects += [Send(worker, WantReports(True)) for worker in workers]

    def _place_waiting(self, fallback: FallbackPlacer, now: float, effects: list[Effect]) -> None:
        for session in fallback.sessions_that_may_fit(self._sessions.values(), now):
            self._place_by_fallback(fallback, session, now, effects)

    def _place_by_fallback(
        self,
        fallback: FallbackPlacer,
        session: Session,
        now: float,
        effects: list[Effect],
        avoid_once: Peer | None = None,
    ) -> None:
        """Start the request on a worker with room for it, under the epoch that no worker knows yet.

        As with the coordinator, a request that no worker can ever hold ends, unless its client has half an answer.
        """
        if fallback.is_too_large(session.num_tokens) and not session.output:
            self.refuse(session, RefusalReason.TOO_LARGE, self._config.retry_s, now, effects)
            return
        placed = fallback.place(session.place_message(avoid_once), now)
        if placed is not None:
            self._counts.num_placed_by_fallback += 1
            self._log.note(session.spec.request_id, now, "placed", f"{_names(placed)}, without a coordinator")
            session.instance, session.token_instance = placed.instance, placed.token_instance
            session.queued_s = now - session.served_at_s - session.waited_s
            self.start(session, now, effects)


def _names(placed: Placed) -> str:
    """Where the request's phases are computed."""
    token = placed.token_instance
    return placed.instance.name if token is None else f"{placed.instance.name}, then {token.name}"

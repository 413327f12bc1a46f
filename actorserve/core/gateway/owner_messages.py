"""Messages from the workers that own requests: tokens, the end, refusals, and hand-overs."""

from actorserve.core.effects import Deliver, Effect, End, Send
from actorserve.core.gateway.counts import GatewayCounts
from actorserve.core.gateway.peers import KnownPeers
from actorserve.core.gateway.placer import SessionPlacer
from actorserve.core.gateway.session import Session, SessionStage
from actorserve.core.messages import (
    Checkpointed,
    Finished,
    HandOver,
    Keep,
    Peer,
    RefusalReason,
    Refused,
    Release,
    Resend,
    Started,
    Tokens,
    Transfer,
    total_energy,
)
from actorserve.core.operations.request_log import RequestLog


class OwnerMessages:
    """Handles workers' messages about requests. A worker that does not own the request is told to release it."""

    def __init__(
        self,
        retry_s: float,
        sessions: dict[str, Session],
        peers: KnownPeers,
        placer: SessionPlacer,
        counts: GatewayCounts,
        log: RequestLog,
    ) -> None:
        self._retry_s = retry_s
        self._sessions = sessions
        self._peers = peers
        self._placer = placer
        self._counts = counts
        self._log = log

    def on_started(self, message: Started, sender: Peer, now: float, effects: list[Effect]) -> None:
        session = self._owned(message.request_id, message.epoch, sender, effects)
        if session is not None and session.stage is SessionStage.STARTING:
            self._log.note(message.request_id, now, "arrived", sender.name)
            session.stage = SessionStage.RUNNING

    def on_tokens(self, message: Tokens, sender: Peer, now: float, effects: list[Effect]) -> None:
        """Deliver the tokens that continue a request's output; drop repeats, and ask for missing tokens."""
        delivered: dict[str, Deliver] = {}
        sessions, request_ids, epochs, positions = (
            self._sessions,
            message.request_ids,
            message.epochs,
            message.positions,
        )
        all_token_ids, all_logprobs, run_lengths = message.token_ids, message.logprobs, message.run_lengths
        all_cached, all_prompt_logprobs = message.num_cached_tokens, message.prompt_logprobs
        all_waited_s = message.waited_s
        worker = self._peers.workers.get(sender)
        running = SessionStage.RUNNING
        end = 0  # of the row's tokens
        for row, request_id in enumerate(request_ids):
            begin = end
            end += run_lengths[row] if run_lengths else 1
            session = sessions.get(request_id)
            if session is None or session.epoch != epochs[row] or session.instance != sender or worker is None:
                self._tell_to_release(request_id, epochs[row], sender, effects)
                continue
            session.stage = running
            first = begin + len(session.output) - positions[row]  # the next missing token
            if first < begin:
                self._request_resend(session, now, effects)
            elif first < end:
                token_ids, logprobs = all_token_ids[first:end], all_logprobs[first:end]
                num_cached_tokens = all_cached[row] if all_cached and first == begin else 0
                prompt_logprobs = all_prompt_logprobs[row] if all_prompt_logprobs and first == begin else None
                name, kind, queued_s = "", "", 0.0
                if session.told_epoch != session.epoch:
                    session.told_epoch, name, kind = session.epoch, sender.name, worker.kind
                    if not session.output:
                        self._log.note(request_id, now, "first token", sender.name)
                        waited_s = all_waited_s[row] if all_waited_s else 0.0
                        queued_s = session.started_s - session.came_at_s + waited_s
                session.output += token_ids
                if (earlier := delivered.get(request_id)) is not None:
                    token_ids, logprobs = earlier.token_ids + token_ids, earlier.logprobs + logprobs
                    num_cached_tokens, prompt_logprobs = earlier.num_cached_tokens, earlier.prompt_logprobs
                    name, queued_s, kind = earlier.worker, earlier.queued_s, earlier.kind
                delivered[request_id] = Deliver(
                    request_id, token_ids, logprobs, num_cached_tokens, prompt_logprobs, name, queued_s, kind
                )
                session.served_at_s = session.patient_from_s = now
                session.resend_requested_s = None
                session.kind = worker.kind
                if session.hand_over is not None:
                    self._commit_or_keep(session, session.hand_over, now, effects)
        effects += delivered.values()

    def on_finished(self, message: Finished, sender: Peer, now: float, effects: list[Effect]) -> None:
        session = self._owned(message.request_id, message.epoch, sender, effects)
        if session is None:
            return
        if message.num_output_tokens > len(session.output):
            session.stage = SessionStage.RUNNING
            self._request_resend(session, now, effects)
            return
        del self._sessions[message.request_id]
        self._placer.unplace(session, effects)
        self._log.note(message.request_id, now, "ended", f"{message.reason.value}, {len(session.output)} tokens")
        effects.append(Send(sender, Release(message.request_id, message.epoch)))
        energy = total_energy(session.energy, message.energy)
        effects.append(End(message.request_id, message.reason, energy=energy))

    def on_refused(self, message: Refused, sender: Peer, now: float, effects: list[Effect]) -> None:
        """The owner gives the request up, whether it ran there or not. The owner repeats this until it is released."""
        session = self._owned(message.request_id, message.epoch, sender, effects)
        if session is None:
            return
        effects.append(Send(sender, Release(message.request_id, message.epoch)))
        self._log.note(message.request_id, now, "given back", f"{sender.name}: {message.reason.value}")
        session.energy = total_energy(session.energy, message.energy)
        match message.reason:
            case RefusalReason.DRAINING:
                self._placer.fail_over(session, now, effects)
            case RefusalReason.TOO_LARGE if not session.output:
                self._placer.refuse(session, message.reason, message.retry_after_s, now, effects)
            case _:
                session.attained = message.attained
                # The coordinator may not know yet that this worker has no room. So avoid the worker now; the retries
                # may choose it again.
                session.begin_epoch(now)
                self._placer.place(session, now, effects, avoid_once=sender)

    def on_hand_over(self, message: HandOver, sender: Peer, now: float, effects: list[Effect]) -> None:
        session = self._owned(message.request_id, message.epoch, sender, effects)
        if session is not None:
            session.stage = SessionStage.RUNNING
            session.hand_over = message
            self._commit_or_keep(session, message, now, effects)

    def on_checkpointed(self, message: Checkpointed, sender: Peer, effects: list[Effect]) -> None:
        session = self._owned(message.request_id, message.epoch, sender, effects)
        if session is not None:
            session.checkpointed = message

    def _owned(self, request_id: str, epoch: int, sender: Peer, effects: list[Effect]) -> Session | None:
        """The session, if ``sender`` owns its request under ``epoch``. Otherwise ``sender`` is told to release it."""
        session = self._sessions.get(request_id)
        if session is not None and session.epoch == epoch and session.instance == sender:
            return session
        self._tell_to_release(request_id, epoch, sender, effects)
        return None

    def _tell_to_release(self, request_id: str, epoch: int, sender: Peer, effects: list[Effect]) -> None:
        self._counts.num_stale_messages += 1
        effects.append(Send(sender, Release(request_id, epoch)))

    def _request_resend(self, session: Session, now: float, effects: list[Effect]) -> None:
        """Ask for the missing tokens, at most once per ``retry_s``, although each token before they come calls this."""
        assert session.instance is not None
        requested_s = session.resend_requested_s
        if requested_s is None or now >= requested_s + self._retry_s:
            session.resend_requested_s = now
            effects.append(Send(session.instance, Resend(session.spec.request_id, session.epoch, len(session.output))))

    def _commit_or_keep(self, session: Session, hand_over: HandOver, now: float, effects: list[Effect]) -> None:
        """Commit the hand-over once all of the owner's tokens are here, or tell the owner to keep the request."""
        owner = session.instance
        assert owner is not None
        if not self._peers.accepts_requests(hand_over.to):
            session.hand_over = None
            effects.append(Send(owner, Keep(hand_over.request_id, hand_over.epoch)))
        elif hand_over.num_output_tokens > len(session.output):
            self._request_resend(session, now, effects)
        else:
            self._counts.num_handed_over += 1
            how = "with its KV" if hand_over.transfer is not None else "without KV"
            self._log.note(hand_over.request_id, now, "migrated", f"{owner.name} to {hand_over.to.name}, {how}")
            token_instance = self._token_instance_after(session, hand_over.to)
            session.begin_epoch(now)
            session.instance, session.token_instance = hand_over.to, token_instance
            session.attained = hand_over.attained
            session.energy = total_energy(session.energy, hand_over.energy)
            session.queued_s = 0.0
            session.transfer = None if hand_over.transfer is None else Transfer(owner, hand_over.transfer)
            self._placer.start(session, now, effects)
            effects.append(Send(owner, Release(hand_over.request_id, hand_over.epoch)))

    def _token_instance_after(self, session: Session, to: Peer) -> Peer | None:
        """Where ``to`` is to hand the request over to. A request whose prompt is still to be computed keeps its token
        instance, where memory is reserved for it.
        """
        token_instance = session.token_instance
        has_token = session.told_epoch == session.epoch  # of this owner
        if has_token or token_instance == to or token_instance not in self._peers.workers:
            return None
        return token_instance

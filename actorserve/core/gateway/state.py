"""The gateway's sessions. Each owns one client's stream, issues its request's epochs, and outlives its workers.

A session asks the coordinator for a worker, starts its request there, and receives the tokens. While the coordinator is
gone the gateway places requests itself (``core.gateway.fallback``). When the owner dies, the session begins a new epoch
and another worker continues from the tokens that the session holds. Epochs are issued here and nowhere else, so at any
time at most one (instance, epoch) is current. Output of any other epoch is dropped, and its sender is told to release
the request.

A worker may refuse a request: because it drains, or because other requests took the memory. That also means a new epoch
and another worker, within the request's patience. A refusal by the coordinator ends a request that has no output.

An owner may also hand a request over to another worker, which may hold a copy of its KV (``core.migration.source``).
Only the session commits that, by the new epoch: the owner asks and pauses the request, and the answer each time is
either to release the request or to keep it. So no lost or late message, and no death, can leave two owners or none.

What a request attained at a worker travels with it if the worker gives it back, and is lost if the worker dies. Then
the request begins at the next worker as new, with a longer prompt. The time since its last token does count there, so
that a feedback queue promotes it no later than others.

Every message to a peer may be lost. So what is not answered is sent again after ``retry_s``, and every message may be
repeated without harm.
"""

from actorserve.core.effects import Available, Effect, End, Send
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.gateway.counts import GatewayCounts
from actorserve.core.gateway.fallback import FallbackPlacer
from actorserve.core.gateway.invariants import SessionInvariants
from actorserve.core.gateway.operators import GatewayOperators
from actorserve.core.gateway.owner_messages import OwnerMessages
from actorserve.core.gateway.peers import KnownPeers
from actorserve.core.gateway.placer import SessionPlacer
from actorserve.core.gateway.session import Session, SessionStage
from actorserve.core.gateway.shown import Shown, shown_instances, shown_requests
from actorserve.core.messages import (
    LOCAL,
    Attained,
    Checkpointed,
    Close,
    Command,
    Finished,
    FinishReason,
    HandOver,
    LoadDigest,
    LoadReport,
    Message,
    Open,
    Orders,
    Peer,
    PeerDown,
    PeerUp,
    Placed,
    RefusalReason,
    Refused,
    Release,
    Role,
    Started,
    Tick,
    Tokens,
)
from actorserve.core.operations.request_log import RequestLog


class GatewayState:
    """The pure state machine of a gateway: all of its sessions."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.sessions: dict[str, Session] = {}
        self.peers = KnownPeers()
        self.counts = GatewayCounts()
        self.log = RequestLog()
        self._placer = SessionPlacer(config, self.sessions, self.peers, self.counts, self.log)
        self._owners = OwnerMessages(config.retry_s, self.sessions, self.peers, self._placer, self.counts, self.log)
        self._operators = GatewayOperators(self.sessions, self.log, self._cancel)
        self._invariants = SessionInvariants()
        self._was_available = False

    @property
    def fallback(self) -> FallbackPlacer | None:
        """What places requests while no coordinator is up."""
        return self._placer.fallback

    @property
    def num_unplaced(self) -> int:
        """How many requests have no owner: they wait at the coordinator or here, or were just sent to a worker."""
        return sum([session.stage is not SessionStage.RUNNING for session in self.sessions.values()])

    def shown(self, now: float, most_requests: int) -> Shown:
        """What people may watch: the instances, and at most so many of the open requests."""
        return Shown(
            now,
            shown_instances(self.peers),
            self.peers.loads_at_s,
            shown_requests(self.sessions.values(), now, most_requests),
            len(self.sessions),
        )

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        """Take one message (local ones have no sender), and return the effects, in order."""
        sender = sender or LOCAL
        effects: list[Effect] = []
        match message:
            case Tokens():
                self._owners.on_tokens(message, sender, now, effects)
            case Finished():
                self._owners.on_finished(message, sender, now, effects)
            case Open(request=spec):
                session = self.sessions[spec.request_id] = Session.opened(
                    spec, now, prefix_aware=self.config.prefix_aware
                )
                self.log.note(spec.request_id, now, "came", f"{len(spec.prompt_token_ids)} prompt tokens")
                self._placer.place(session, now, effects)
            case Close():
                self._on_close(message, now, effects)
            case Command() if sender == self.peers.coordinator:
                self._operators.on_command(message, sender, now, effects)
            case Placed():
                self._placer.on_placed(message, sender, now, effects)
            case Started():
                self._owners.on_started(message, sender, now, effects)
            case Refused() if sender in self.peers.workers:
                self._owners.on_refused(message, sender, now, effects)
            case Refused():
                self._placer.on_refused(message, now, effects)
            case HandOver():
                self._owners.on_hand_over(message, sender, now, effects)
            case Checkpointed():
                self._owners.on_checkpointed(message, sender, effects)
            case LoadReport() if sender in self.peers.workers:
                self.peers.loads[sender] = message
                self.peers.loads_at_s = now
                self._placer.on_load_report(sender, message, now, effects)
            case LoadDigest() if sender == self.peers.coordinator:
                self.peers.take(message, now)
            case Orders() if sender == self.peers.coordinator:
                self._operators.orders.merge(message)
            case PeerUp():
                self._on_peer_up(message, now, effects)
            case PeerDown(peer=peer):
                self._on_peer_down(peer, now, effects)
            case Tick():
                self._placer.on_tick(now, effects)
            case _:
                self.counts.num_stale_messages += 1
        return effects

    def next_deadline(self) -> float | None:
        """When to send the next Tick, in seconds on the shell's clock."""
        return self._placer.next_tick_s

    def validate(self) -> None:
        """Check the sessions' invariants (``core.gateway.invariants``). For tests, after each event.

        Raises: AssertionError that says which invariant does not hold.
        """
        self._invariants.check(self.sessions, self.peers, self._placer)

    def _on_close(self, message: Close, now: float, effects: list[Effect]) -> None:
        session = self.sessions.pop(message.request_id, None)
        if session is not None:
            how = "a stop string" if message.is_complete else "its client left"
            self.log.note(message.request_id, now, "ended", f"{how}, {len(session.output)} tokens")
            self._let_go(session, effects, is_complete=message.is_complete)

    def _cancel(self, request_id: str, now: float, effects: list[Effect]) -> None:
        """An operator ends an open request."""
        session = self.sessions.pop(request_id)
        self.log.note(request_id, now, "ended", f"an operator cancelled it, {len(session.output)} tokens")
        self._let_go(session, effects)
        effects.append(End(request_id, FinishReason.ERROR, RefusalReason.CANCELLED))

    def _let_go(self, session: Session, effects: list[Effect], *, is_complete: bool = False) -> None:
        """Have the other processes forget a request."""
        self._placer.unplace(session, effects)
        if session.stage is not SessionStage.PLACING and session.instance is not None:
            effects.append(Send(session.instance, Release(session.spec.request_id, session.epoch, is_complete)))

    def _on_peer_up(self, message: PeerUp, now: float, effects: list[Effect]) -> None:
        if message.role is Role.COORDINATOR:
            self.peers.coordinator = message.peer
            self.counts.num_takeovers += 0 < self.peers.term < message.term
            self.peers.term = max(self.peers.term, message.term)
            if (orders := self._operators.orders.message()) is not None:
                effects.append(Send(message.peer, orders))
            self._placer.on_coordinator_up(now, effects)
        elif message.worker is not None:
            if not self._was_available:
                self._was_available = True
                effects.append(Available())
            self.peers.workers[message.peer] = message.worker
            self._placer.on_worker_up(message.peer, message.worker, now, effects)

    def _on_peer_down(self, peer: Peer, now: float, effects: list[Effect]) -> None:
        self.peers.loads.pop(peer, None)
        if peer == self.peers.coordinator:
            self.peers.coordinator = None
            self._placer.on_coordinator_down(now, effects)
        if self.fallback is not None:
            self.fallback.remove_worker(peer)
        if self.peers.workers.pop(peer, None) is not None:
            for session in list(self.sessions.values()):
                if session.instance == peer:
                    session.attained = Attained()
                    if session.stage is not SessionStage.PLACING:
                        session.energy = None  # the worker took that knowledge with it
                    self._placer.fail_over(session, now, effects)

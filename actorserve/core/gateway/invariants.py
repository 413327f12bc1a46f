"""What must hold of a gateway's sessions after each event (design, section 5: one owner, every token once)."""

from dataclasses import dataclass

from actorserve.core.gateway.peers import KnownPeers
from actorserve.core.gateway.placer import SessionPlacer
from actorserve.core.gateway.session import Session, SessionStage


@dataclass(frozen=True, slots=True)
class _Seen:
    """A session as the last check found it."""

    session: Session
    epoch: int
    stage: SessionStage
    output: tuple[int, ...]


class SessionInvariants:
    """Checks sessions. It remembers their epochs and outputs between checks, because both may only grow."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def check(self, sessions: dict[str, Session], peers: KnownPeers, placer: SessionPlacer) -> None:
        """Raises: AssertionError that names the request and what does not hold of it."""
        assert peers.coordinator is None or placer.fallback is None, "coordinator and fallback both place requests"
        for request_id, session in sessions.items():
            assert session.spec.request_id == request_id, f"{request_id}: filed under another request's id"
            _check_stage(session, peers)
            _check_retry(session, placer)
            self._check_growth(request_id, session)
        self._seen = {
            request_id: _Seen(session, session.epoch, session.stage, tuple(session.output))
            for request_id, session in sessions.items()
        }

    def _check_growth(self, request_id: str, session: Session) -> None:
        """Epochs only grow, and output positions are absolute: a token that the client has never changes."""
        given = session.spec.output_token_ids
        assert tuple(session.output[: len(given)]) == given, f"{request_id}: lost the output that it was opened with"
        seen = self._seen.get(request_id)
        if seen is None or seen.session is not session:
            assert session.epoch >= 1, f"{request_id}: epochs begin with 1"
            return
        assert session.epoch >= seen.epoch, f"{request_id}: went back from epoch {seen.epoch} to {session.epoch}"
        kept = tuple(session.output[: len(seen.output)])
        assert kept == seen.output, f"{request_id}: tokens that the client has were changed"
        if session.epoch == seen.epoch:
            assert session.stage.value >= seen.stage.value, f"{request_id}: lost its owner without a new epoch"


def _check_stage(session: Session, peers: KnownPeers) -> None:
    """The current epoch has one owner, or the request waits for one."""
    request_id = session.spec.request_id
    hand_over, checkpointed = session.hand_over, session.checkpointed
    if session.stage is SessionStage.PLACING:
        assert session.instance not in peers.workers, f"{request_id}: its worker is up, but it was not started there"
        assert session.transfer is None, f"{request_id}: has copied KV, but no owner"
        assert session.resend_requested_s is None, f"{request_id}: asked for tokens again, but has no owner"
        assert checkpointed is None, f"{request_id}: has checkpoints, but no owner"
    else:
        assert session.instance in peers.workers, f"{request_id}: its owner is not up"
    if hand_over is not None:
        assert session.stage is SessionStage.RUNNING, f"{request_id}: is handed over, but does not run"
        assert (hand_over.request_id, hand_over.epoch) == (request_id, session.epoch), (
            f"{request_id}: is handed over under another epoch"
        )
        assert hand_over.num_output_tokens > len(session.output), f"{request_id}: its hand-over waits for no token"
    if checkpointed is not None:
        assert (checkpointed.request_id, checkpointed.epoch) == (request_id, session.epoch), (
            f"{request_id}: has checkpoints of another epoch"
        )


def _check_retry(session: Session, placer: SessionPlacer) -> None:
    """What was sent to a peer and not answered is sent again."""
    if session.stage is not SessionStage.RUNNING:
        assert placer.next_tick_s is not None, f"{session.spec.request_id}: no tick will send its message again"
        assert placer.next_tick_s <= session.retry_at_s, f"{session.spec.request_id}: its retry is forgotten"

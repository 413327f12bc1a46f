"""What a gateway shows to those who watch: the instances that it knows, and its own requests with where they run."""

from collections.abc import Iterable
from itertools import islice
from typing import Final, NamedTuple

from actorserve.core.gateway.peers import KnownPeers
from actorserve.core.gateway.session import Session, SessionStage
from actorserve.core.messages import Cordon, LoadReport

_STAGES: Final = {
    SessionStage.PLACING: "waiting",
    SessionStage.STARTING: "starting",
    SessionStage.RUNNING: "running",
}


class ShownInstance(NamedTuple):
    """An instance that is up. ``state`` says in one word what it does for operators; ``report`` is its last one."""

    name: str
    incarnation: int
    host: str
    state: str
    model: str
    kind: str
    report: LoadReport | None


class ShownRequest(NamedTuple):
    """An open request. ``worker`` is the name of the instance that has it, or was asked to start it; else it is empty.
    ``num_moves`` counts how often it got another owner.
    """

    request_id: str
    worker: str
    state: str
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    age_s: float
    priority: int
    client: str
    num_moves: int


class Shown(NamedTuple):
    """``now_s`` is this moment on the shell's clock, and ``reports_at_s`` when the last report came. ``num_requests``
    counts all open requests, also those that are not listed.
    """

    now_s: float
    instances: tuple[ShownInstance, ...]
    reports_at_s: float
    requests: tuple[ShownRequest, ...]
    num_requests: int


def shown_instances(peers: KnownPeers) -> tuple[ShownInstance, ...]:
    """All instances that are up, in the order of their names."""
    return tuple(
        ShownInstance(peer.name, peer.incarnation, peer.host, _state_of(report), worker.model.name, worker.kind, report)
        for peer, worker in sorted(peers.workers.items())
        for report in (peers.loads.get(peer),)
    )


def shown_requests(sessions: Iterable[Session], now: float, most: int) -> tuple[ShownRequest, ...]:
    """The first ``most`` open requests, in order of arrival."""
    return tuple(
        ShownRequest(
            session.spec.request_id,
            "" if session.instance is None else session.instance.name,
            "moving" if session.hand_over is not None else _STAGES[session.stage],
            len(session.spec.prompt_token_ids),
            len(session.output),
            session.spec.sampling.max_tokens,
            now - session.came_at_s,
            session.spec.priority,
            session.spec.client,
            session.epoch - 1,
        )
        for session in islice(sessions, most)
    )


def _state_of(report: LoadReport | None) -> str:
    """The words are those of the console, as far as the last report tells."""
    if report is None:
        return "silent"
    if report.draining:
        return "terminating"
    if report.cordon is Cordon.EMPTYING:
        return "emptying" if report.num_running + report.num_waiting else "empty"
    return "cordoned" if report.cordon is Cordon.CORDONED else "open"

"""Coordinators' cores, whose instances report what the test says, and whose state is validated after each event."""

from dataclasses import replace
from typing import Any

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import Effect, Send
from actorserve.core.messages import (
    LoadReport,
    Message,
    ModelInfo,
    Peer,
    PeerUp,
    Place,
    Placed,
    Role,
    Speed,
    WorkerInfo,
)
from tests.core.harness.fleets import GATEWAY, MODEL, report

A, B = Peer("worker-0", 1), Peer("worker-1", 1)
SPEED = Speed((100, 1000), (1.0, 10.0), 1.0)  # one second per hundred tokens; the first quantum is one second


def handle_validated(state: ClusterState, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
    """The effects of a message; the invariants are checked afterwards."""
    effects = state.handle(message, now, sender)
    state.validate()
    return effects


class Coordinator:
    """A ClusterState whose instances hold 100 blocks of 10 tokens and 10 bytes, and report what the test says."""

    def __init__(self, *workers: Peer, **config: object) -> None:
        self.state = ClusterState(ClusterConfig(100, 1.0, **config))  # type: ignore[arg-type]
        self.sequence = 0
        self.accepted: list[str] = []
        for peer in workers:
            self.up(peer)

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        return handle_validated(self.state, message, now, sender)

    def up(self, peer: Peer, speed: Speed | None = SPEED, kind: str = "k") -> None:
        self.handle(PeerUp(peer, Role.WORKER, WorkerInfo(kind, ModelInfo("m", 100, 1000), speed)), 0.0)

    def place(
        self,
        name: str,
        num_tokens: int,
        now: float = 0.0,
        epoch: int = 1,
        priority: int = 0,
        avoid: Peer | None = None,
    ) -> list[Effect]:
        return self.handle(Place(name, epoch, num_tokens, priority, avoid=avoid), now, GATEWAY)

    def report(
        self, peer: Peer, room_tokens: int, now: float = 0.0, waiting: int = 0, **fields: object
    ) -> list[tuple[str, str]]:
        """``peer`` reports how much room its started requests leave; returns the placements that follow.

        The report confirms all placements in flight to ``peer`` and includes them.
        """
        self.sequence += 1
        needed = 1000 - room_tokens
        view = self.state.fleet.views.get(peer)
        accepted = () if view is None else tuple(view.in_flight)
        load = LoadReport(self.sequence, 1, waiting, 1000, needed, needed, 10, 10, 0, accepted, kv_needed_bytes=needed)
        return placements(self.handle(replace(load, **fields), now, peer))  # type: ignore[arg-type]

    @property
    def reserved(self) -> dict[str, str]:
        """The request that each reserved instance is reserved for."""
        views = self.state.fleet.views.values()
        return {view.peer.name: view.reserved_for.request_id for view in views if view.reserved_for is not None}


class SmallCluster:
    """A coordinator's core whose instances have reported, and in which two requests may wait."""

    def __init__(self, num_instances: int = 2, **config: Any) -> None:
        self.state = ClusterState(ClusterConfig(max_waiting_requests=2, retry_s=1.0, **config))
        self.workers = [Peer(f"worker-{i}", 1) for i in range(num_instances)]
        for peer in self.workers:
            self.handle(PeerUp(peer, Role.WORKER, WorkerInfo("k", MODEL)), 0.0)
            self.handle(report(), 0.0, peer)

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        return handle_validated(self.state, message, now, sender)

    def place(self, name: str, num_tokens: int = 40, epoch: int = 1, now: float = 0.0) -> Placed:
        (effect,) = self.handle(Place(name, epoch, num_tokens), now, GATEWAY)
        assert isinstance(effect, Send)
        assert isinstance(effect.message, Placed)
        return effect.message


def placements(effects: list[Effect]) -> list[tuple[str, str]]:
    """(request, instance) of each placement."""
    messages = [effect.message for effect in effects if isinstance(effect, Send)]
    return [(message.request_id, message.instance.name) for message in messages if isinstance(message, Placed)]

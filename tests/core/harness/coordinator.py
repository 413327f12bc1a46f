"""A coordinator's core, whose instances report what the test says."""

from dataclasses import replace

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import Effect, Send
from actorserve.core.messages import LoadReport, ModelInfo, Peer, PeerUp, Place, Placed, Role, Speed, WorkerInfo

GATEWAY = Peer("gateway-0", 1)
A, B = Peer("worker-0", 1), Peer("worker-1", 1)
SPEED = Speed((100, 1000), (1.0, 10.0), 1.0)  # a second a hundred tokens, and the first quantum is a second


class Coordinator:
    """A ClusterState whose instances hold 100 blocks of 10 tokens and 10 bytes, and report what the test says."""

    def __init__(self, *workers: Peer, **config: object) -> None:
        self.state = ClusterState(ClusterConfig(100, 1.0, **config))  # type: ignore[arg-type]
        self.sequence = 0
        self.accepted: list[str] = []
        for peer in workers:
            self.up(peer)

    def up(self, peer: Peer, speed: Speed | None = SPEED) -> None:
        self.state.handle(PeerUp(peer, Role.WORKER, WorkerInfo("k", ModelInfo("m", 100, 1000), speed)), 0.0)

    def place(self, name: str, num_tokens: int, now: float = 0.0, epoch: int = 1, priority: int = 0) -> list[Effect]:
        return self.state.handle(Place(name, epoch, num_tokens, priority), now, GATEWAY)

    def report(
        self, peer: Peer, room_tokens: int, now: float = 0.0, waiting: int = 0, **fields: object
    ) -> list[tuple[str, str]]:
        """``peer`` says how much room its started requests leave: who is placed where in answer to that.

        What was placed before has come there, and is part of what it says.
        """
        self.sequence += 1
        needed = 1000 - room_tokens
        accepted = tuple(self.state.instances[peer].in_flight)
        report = LoadReport(
            self.sequence, 1, waiting, 1000, needed, needed, 10, 10, 0, accepted, kv_needed_bytes=needed
        )
        return placements(self.state.handle(replace(report, **fields), now, peer))  # type: ignore[arg-type]

    @property
    def kept(self) -> dict[str, str]:
        """Which instance is kept for whom."""
        views = self.state.instances.values()
        return {view.peer.name: view.reserved_for.request_id for view in views if view.reserved_for is not None}


def placements(effects: list[Effect]) -> list[tuple[str, str]]:
    """(request, instance) of each placement."""
    messages = [effect.message for effect in effects if isinstance(effect, Send)]
    return [(message.request_id, message.instance.name) for message in messages if isinstance(message, Placed)]

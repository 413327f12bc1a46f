"""A coordinator's core that pairs instances for migration; the test makes the instances' reports."""

from collections.abc import Mapping

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import Effect, Send
from actorserve.core.messages import (
    InstanceRole,
    LoadReport,
    Message,
    MigrateTo,
    ModelInfo,
    Peer,
    PeerUp,
    Role,
    Tick,
    WorkerInfo,
)
from actorserve.core.migration.pairing import PairingConfig
from actorserve.core.placement.instance_view import InstanceView
from tests.core.harness.coordinator import handle_validated

TOTAL = 1000  # blocks, each of one token and one byte
CONFIG = PairingConfig(source_below=10.0, source_until=20.0, destination_above=40.0, ttl_s=1.0, rest_s=2.0)
A, B, C = Peer("worker-0", 1), Peer("worker-1", 1), Peer("worker-2", 1)


class Cluster:
    """A coordinator whose instances' reports and decision rounds the test controls."""

    def __init__(self, *workers: Peer, kinds: Mapping[Peer, str] = {}, **config: object) -> None:
        self.now = 0.0
        self.sequence = 0
        config = {"migration": CONFIG, "report_ttl_s": 1000.0} | config
        self.state = ClusterState(ClusterConfig(100, 1.0, **config))  # type: ignore[arg-type]
        for peer in workers:
            up = PeerUp(peer, Role.WORKER, WorkerInfo(kinds.get(peer, "k"), ModelInfo("m", 100, TOTAL)))
            self.handle(up, 0.0)

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        return handle_validated(self.state, message, now, sender)

    def report(self, peer: Peer, needed: int, running: int, **fields: int | bool | InstanceRole) -> list[Effect]:
        """``running`` requests use ``needed`` bytes, which is also the default of V."""
        self.sequence += 1
        fields = {"virtual_usage_bytes": needed, "num_waiting": 0, "num_preemptions": 0, **fields}
        report = LoadReport(
            sequence=self.sequence,
            num_running=running,
            kv_total_bytes=TOTAL,
            kv_used_bytes=needed,
            bytes_per_block=1,
            tokens_per_block=1,
            kv_needed_bytes=needed,
            **fields,  # type: ignore[arg-type]
        )
        return self.handle(report, self.now, peer)

    def orders(self, after_s: float = 0.25) -> list[tuple[str, str, int]]:
        """(source, destination, bytes) of each MigrateTo of a round."""
        self.now += after_s
        effects = self.handle(Tick(), self.now)
        sends = [effect for effect in effects if isinstance(effect, Send)]
        return [
            (send.to.name, send.message.destination.name, send.message.num_bytes)
            for send in sends
            if isinstance(send.message, MigrateTo)
        ]

    def view(self, peer: Peer) -> InstanceView:
        return self.state.fleet.views[peer]

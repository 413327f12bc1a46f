"""Coordinators' cores that scale, and the instances' reports over virtual time."""

from dataclasses import dataclass, field
from typing import Any

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import Effect, Send, StartWorker
from actorserve.core.messages import (
    Drain,
    LoadReport,
    Message,
    ModelInfo,
    Peer,
    PeerDown,
    PeerUp,
    Role,
    SetRole,
    Speed,
    Tick,
    WorkerInfo,
)
from actorserve.core.pools.config import PoolsConfig
from tests.core.harness.coordinator import handle_validated
from tests.core.harness.fleets import GATEWAY

SPEED = Speed((100, 1000), (1.0, 10.0), 0.01)  # one second per hundred tokens
TOTAL = 1000  # blocks of a token and a byte each
CONFIG = ScalingConfig(max_workers=4, scale_out_below=20.0, scale_in_above=100.0, hold_s=2.0, start_timeout_s=30.0)


@dataclass
class Load:
    """An instance's report."""

    needed: int = 0
    running: int = 0
    fields: dict[str, Any] = field(default_factory=dict)


class Cluster:
    """A coordinator that scales, and instances that report every fourth of a second."""

    def __init__(self, *loads: Load, config: ScalingConfig = CONFIG, pools: PoolsConfig | None = None) -> None:
        self.now = 0.0
        self.sequence = 0
        pools = pools or PoolsConfig()
        self.state = ClusterState(ClusterConfig(100, 1.0, report_ttl_s=1.0, scaling=config, pools=pools))
        self.loads: dict[Peer, Load] = {}
        self.effects: list[tuple[float, str]] = []  # when, and "start" or "start ROLE", or the instance that is to end
        self.handle(PeerUp(GATEWAY, Role.GATEWAY), 0.0)
        for number, load in enumerate(loads):
            self.come(f"worker-{number}", load)

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        return handle_validated(self.state, message, now, sender)

    def come(self, name: str, load: Load) -> None:
        peer = Peer(name, 1)
        self.loads[peer] = load
        self.handle(PeerUp(peer, Role.WORKER, WorkerInfo("k", ModelInfo("m", 100, TOTAL), SPEED)), self.now)

    def go(self, name: str) -> None:
        del self.loads[Peer(name, 1)]
        self.handle(PeerDown(Peer(name, 1)), self.now)

    def run(self, seconds: float) -> list[tuple[float, str]]:
        """The decisions in that time."""
        first = len(self.effects)
        for _ in range(round(seconds / 0.25)):
            for peer, load in self.loads.items():
                self._take(self.handle(self._report(load), self.now, peer))
            self.now += 0.25
            deadline = self.state.next_deadline()
            assert deadline is not None
            if deadline <= self.now:
                self._take(self.handle(Tick(), self.now))
        return self.effects[first:]

    def _report(self, load: Load) -> LoadReport:
        self.sequence += 1
        fields = {"num_waiting": 0} | load.fields
        return LoadReport(
            sequence=self.sequence,
            num_running=load.running,
            kv_total_bytes=TOTAL,
            kv_used_bytes=load.needed,
            virtual_usage_bytes=load.needed,
            bytes_per_block=1,
            tokens_per_block=1,
            num_preemptions=0,
            kv_needed_bytes=load.needed,
            **fields,
        )

    def _take(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartWorker(role=role):
                    self.effects.append((self.now, "start" if role is None else f"start {role}"))
                case Send(to=to, message=Drain()):
                    self.effects.append((self.now, to.name))
                case Send(to=to, message=SetRole(role=role)) if to in self.loads:
                    self.loads[to].fields["role"] = role

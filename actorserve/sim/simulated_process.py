"""A process of a simulated cluster."""

from dataclasses import dataclass, field
from typing import Protocol

from actorserve.core.effects import Effect
from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import LoadReport, Message, Peer, PeerUp, Role
from actorserve.sim.engine_model import EngineModel, Flight


class Core(Protocol):
    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]: ...

    def next_deadline(self) -> float | None: ...


@dataclass(eq=False)
class Process:
    """One incarnation of a process: its core, the peers that it has met, and when its next Tick is due."""

    peer: Peer
    role: Role
    core: Core
    engine: EngineModel | None = None
    flights: list[Flight] = field(default_factory=list)  # in the order of their steps; at most two
    born_s: float = 0.0
    met: dict[Peer, PeerUp] = field(default_factory=dict)
    tick_at_s: float | None = None
    report: LoadReport | None = None
    kv_used_sum: float = 0.0
    num_reports: int = 0
    num_preemptions: int = 0

    @property
    def newest_flight(self) -> Flight | None:
        return self.flights[-1] if self.flights else None

    @property
    def quiet_flight(self) -> Flight | None:
        """The newest flight, if quiet steps will follow its step."""
        return self.flights[-1] if self.flights and self.flights[-1].is_quiet else None

    def next_deadline(self) -> float | None:
        """When the core wants a Tick. It plans no quiet step, because the simulator takes many of them at once."""
        return self.worker_core.next_deadline_when_quiet() if self.quiet_flight else self.core.next_deadline()

    @property
    def worker_engine(self) -> EngineModel:
        """The engine of a worker."""
        assert self.engine is not None
        return self.engine

    @property
    def worker_core(self) -> InstanceState:
        """The core of a worker."""
        assert isinstance(self.core, InstanceState)
        return self.core

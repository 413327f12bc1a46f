"""A process of a simulated cluster."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from actorserve.core.effects import Effect
from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import HandOver, KVAccess, LoadReport, Message, Offer, Peer, PeerUp, Role, Stage
from actorserve.sim.engine_model import EngineModel, Flight
from actorserve.sim.instance_metrics import fragmentation, unmet_demand
from actorserve.sim.results import Counts


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

    def step_in_flight(self, step_id: int) -> tuple[float, float] | None:
        """When this iteration of a worker will end, and its duration; None if it is not in flight."""
        # The core's newest iteration has no flight yet while earlier effects are performed.
        for step, flight in zip(self.worker_core.steps.in_flight, self.flights, strict=False):
            if step.step_id == step_id:
                return flight.ends[0]
        return None

    def pause_s(self, message: Offer | Stage | HandOver, now: float) -> float:
        """From when on the message's request may be paused: from the end of the iteration that it names, if any."""
        step = None if isinstance(message, HandOver) else self.step_in_flight(message.ticket.step_id)
        return now if step is None else step[0]

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

    def add_to(self, counts: Counts) -> None:
        """Add what this worker did in its life."""
        engine = self.worker_engine
        counts.add_moves(self.worker_core.migration_source)
        counts.busy_s += engine.busy_s
        counts.num_steps += engine.num_steps
        counts.num_rows += engine.num_rows
        if self.report is not None:
            counts.add(self.report)
        if self.num_reports:
            counts.kv_used.append(self.kv_used_sum / self.num_reports)


def process_access(peer: Peer) -> KVAccess:
    """How an instance's KV is read: by its name, also while iterations write it."""
    return KVAccess("simulated", peer.name, progress=peer.name)


def sampled_fragmentation(
    workers: Sequence[Process], in_line: Sequence[int], advance: Callable[[Process], None]
) -> float:
    """The fragmentation now. ``advance`` brings a worker whose steps are quiet up to now."""
    # No request waits on an instance while its steps are quiet.
    demands = [unmet_demand(worker.worker_core) for worker in workers if worker.quiet_flight is None]
    if not any(demands) and not in_line:
        return 0.0
    for worker in workers:
        advance(worker)
    return fragmentation([worker.worker_core for worker in workers], [*filter(None, demands)], in_line)

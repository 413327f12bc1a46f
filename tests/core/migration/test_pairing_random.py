"""Migration pairing under random events: its invariants hold after each event, and its orders follow the rules."""

import random
from dataclasses import dataclass, field
from math import ceil, inf

import pytest

from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import Send
from actorserve.core.messages import MigrateTo, ModelInfo, Peer, PeerDown, PeerUp, Role, Tick, WorkerInfo
from tests.core.harness.pairs import CONFIG, TOTAL, Cluster

PEERS = tuple(Peer(f"worker-{number}", 1) for number in range(5))
REPORT_TTL_S = 2.0
ROUND_S = 0.25
NUM_EVENTS = 1500
WEIGHTS = {
    "add": 8,
    "grow": 4,
    "finish": 6,
    "move": 12,
    "fail": 2,
    "drain": 0.3,
    "down": 0.7,
    "up": 3,
    "report": 16,
    "wait": 6,
}
"""Events by how often they come."""


@dataclass(frozen=True)
class Reported:
    """What a worker reported last, and when."""

    used_bytes: int
    num_running: int
    draining: bool
    at_s: float

    @property
    def free_bytes(self) -> int:
        return TOTAL - self.used_bytes

    @property
    def iterations(self) -> float:
        """F: a block has one token, and a token has one byte."""
        return self.free_bytes / max(1, self.num_running)


@dataclass
class Worker:
    """What a worker has. The coordinator knows only ``reported``."""

    kind: str
    sizes: list[int] = field(default_factory=list)
    order: MigrateTo | None = None
    until_s: float = 0.0
    left: int = 0
    draining: bool = False
    num_migrated: int = 0
    migrated_bytes: int = 0
    num_failed: int = 0
    reported: Reported = Reported(0, 0, False, -inf)
    no_source_until_s: float = -inf
    """Until then it rests, because it may have received requests."""


class RandomCluster:
    """A coordinator, and workers that obey orders late, in part, or not at all."""

    def __init__(self, seed: int) -> None:
        self.cluster = Cluster(report_ttl_s=REPORT_TTL_S)
        self.workers: dict[Peer, Worker] = {}
        self.num_orders = 0
        self.num_drain_orders = 0
        self.num_stops = 0
        self._rng = random.Random(seed)
        for peer in PEERS:
            self.up(peer)

    @property
    def state(self) -> ClusterState:
        return self.cluster.state

    def event(self) -> None:
        [name] = self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        peer = self._rng.choice(PEERS)
        if name in ("up", "wait") or peer in self.workers:
            getattr(self, name)(peer)
        self.check()

    def up(self, peer: Peer) -> None:
        if peer not in self.workers:
            kind = "x" if peer == PEERS[-1] else "k"
            self.workers[peer] = Worker(kind)
            info = WorkerInfo(kind, ModelInfo("m", 100, TOTAL))
            self.cluster.handle(PeerUp(peer, Role.WORKER, info), self.cluster.now)
            self.report(peer)

    def down(self, peer: Peer) -> None:
        del self.workers[peer]
        self.cluster.handle(PeerDown(peer), self.cluster.now)

    def add(self, peer: Peer) -> None:
        self.workers[peer].sizes.append(self._rng.randint(1, 300))

    def grow(self, peer: Peer) -> None:
        by = self._rng.randint(1, 60)
        self.workers[peer].sizes = [size + by for size in self.workers[peer].sizes]

    def finish(self, peer: Peer) -> None:
        if sizes := self.workers[peer].sizes:
            sizes.pop(self._rng.randrange(len(sizes)))

    def drain(self, peer: Peer) -> None:
        self.workers[peer].draining = True

    def fail(self, peer: Peer) -> None:
        if self.workers[peer].order is not None:
            self.workers[peer].num_failed += 1

    def move(self, peer: Peer) -> None:
        """The source hands over the first request that fits into what its order leaves."""
        source = self.workers[peer]
        if source.order is None or self.cluster.now >= source.until_s:
            return
        destination = self.workers.get(source.order.destination)
        size = next((size for size in source.sizes if size <= source.left), None)
        if destination is not None and size is not None:
            source.sizes.remove(size)
            destination.sizes.append(size)
            source.left -= size
            source.num_migrated += 1
            source.migrated_bytes += size

    def report(self, peer: Peer) -> None:
        worker = self.workers[peer]
        worker.reported = Reported(sum(worker.sizes), len(worker.sizes), worker.draining, self.cluster.now)
        self.cluster.report(
            peer,
            sum(worker.sizes),
            len(worker.sizes),
            draining=worker.draining,
            num_migrated=worker.num_migrated,
            migrated_bytes=worker.migrated_bytes,
            num_migrations_failed=worker.num_failed,
        )

    def wait(self, _: Peer) -> None:
        self.wait_rounds(self._rng.randint(1, 4))

    def wait_rounds(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            self.cluster.now += ROUND_S
            for effect in self.cluster.handle(Tick(), self.cluster.now):
                assert isinstance(effect, Send)
                assert isinstance(effect.message, MigrateTo)
                self.take(effect.to, effect.message)

    def take(self, peer: Peer, order: MigrateTo) -> None:
        """The source gets an order: check it against the last reports. No other move is part of the sum, because an
        instance takes part in one move at most.
        """
        worker = self.workers[peer]
        worker.order, worker.until_s, worker.left = order, self.cluster.now + order.ttl_s, order.num_bytes
        if not order.num_bytes:
            self.num_stops += 1
            return
        source, destination = worker.reported, self.workers[order.destination].reported
        for reported in (source, destination):
            assert self.cluster.now < reported.at_s + REPORT_TTL_S, "a stale instance takes part in no new move"
        assert worker.kind == self.workers[order.destination].kind
        assert not destination.draining
        assert destination.iterations > CONFIG.destination_above
        assert order.num_bytes <= source.used_bytes
        # With requests of the mean size the destination becomes neither a source nor fuller than the source.
        mean_bytes = max(1.0, source.used_bytes / source.num_running)
        num_after = max(1, destination.num_running) + order.num_bytes / mean_bytes
        assert (destination.free_bytes - order.num_bytes) / num_after >= CONFIG.source_until - 1e-6
        if source.draining:
            self.num_drain_orders += 1
        else:
            assert source.iterations < CONFIG.source_below
            assert source.free_bytes <= destination.free_bytes - order.num_bytes
            assert self.cluster.now >= worker.no_source_until_s, "an instance that received rests before it sends"
        self.workers[order.destination].no_source_until_s = self.cluster.now + order.ttl_s + CONFIG.rest_s
        self.num_orders += 1

    def check(self) -> None:
        pairing = self.state.pairing
        assert pairing is not None
        sources = list(pairing.moves)
        destinations = [move.destination.peer for move in pairing.moves.values()]
        assert len(set(sources + destinations)) == 2 * len(pairing.moves), "an instance takes part in two moves"
        promised = dict.fromkeys(self.state.fleet.views, 0)
        for source, move in pairing.moves.items():
            assert self.state.fleet.views[source] is move.source
            assert self.state.fleet.views[move.destination.peer] is move.destination
            assert 0 <= move.left_bytes <= move.num_bytes
            promised[move.destination.peer] += move.left_bytes
        for peer, view in self.state.fleet.views.items():
            assert view.promised_bytes == promised[peer]


@pytest.mark.parametrize("seed", range(20))
def test_pairing_holds_under_random_events(seed: int) -> None:
    """No instance sends and receives at once, or gets more than it can hold; at the end no bytes are promised."""
    cluster = RandomCluster(seed)
    for _ in range(NUM_EVENTS):
        cluster.event()
    assert cluster.num_orders - cluster.num_drain_orders >= 10, "almost no instance was crowded"
    assert cluster.num_drain_orders >= 5, "almost no instance was drained"
    assert cluster.num_stops >= 5, "almost no move was stopped"
    for worker in cluster.workers.values():
        worker.sizes.clear()
    for peer in cluster.workers:
        cluster.report(peer)
    cluster.wait_rounds(1 + ceil(CONFIG.ttl_s / ROUND_S))
    cluster.check()
    assert cluster.state.pairing is not None
    assert not cluster.state.pairing.moves
    assert all(view.dispatch_freeness() in (TOTAL, -inf) for view in cluster.state.fleet.views.values())

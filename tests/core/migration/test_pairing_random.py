"""Migration pairing under random events: its invariants hold after each of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, inf

from hypothesis import given, settings, strategies as st

from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import Send
from actorserve.core.messages import MigrateTo, ModelInfo, Peer, PeerDown, PeerUp, Role, Tick, WorkerInfo
from tests.core.harness.pairs import CONFIG, TOTAL, A, Cluster

PEERS = tuple(Peer(f"worker-{number}", 1) for number in range(5))
EVENTS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(PEERS), st.integers(1, 300)),
    st.tuples(st.just("grow"), st.sampled_from(PEERS), st.integers(1, 60)),
    st.tuples(st.just("finish"), st.sampled_from(PEERS), st.integers(0, 9)),
    st.tuples(st.just("move"), st.sampled_from(PEERS), st.integers(0, 9)),
    st.tuples(st.just("fail"), st.sampled_from(PEERS), st.just(0)),
    st.tuples(st.just("drain"), st.sampled_from(PEERS), st.just(0)),
    st.tuples(st.just("down"), st.sampled_from(PEERS), st.just(0)),
    st.tuples(st.just("up"), st.sampled_from(PEERS), st.just(0)),
    st.tuples(st.just("report"), st.sampled_from(PEERS), st.just(0)),
    st.tuples(st.just("report"), st.sampled_from(PEERS), st.just(0)),
    st.tuples(st.just("wait"), st.just(A), st.integers(1, 12)),
)


@dataclass
class Worker:
    """A worker's load, which it reports when the test says so."""

    kind: str
    sizes: list[int] = field(default_factory=list)
    order: MigrateTo | None = None
    until_s: float = 0.0
    left: int = 0
    draining: bool = False
    num_migrated: int = 0
    migrated_bytes: int = 0
    num_failed: int = 0


class Random:
    """A coordinator, and workers that carry out moves late, in part, or not at all."""

    def __init__(self) -> None:
        self.cluster = Cluster(report_ttl_s=2.0)
        self.workers: dict[Peer, Worker] = {}
        self.lives = 0
        for peer in PEERS:
            self.up(peer, 0)

    @property
    def state(self) -> ClusterState:
        return self.cluster.state

    def event(self, name: str, peer: Peer, number: int) -> None:
        if name in ("up", "wait") or peer in self.workers:
            getattr(self, name)(peer, number)
        self.check()

    def up(self, peer: Peer, _: int) -> None:
        if peer not in self.workers:
            kind = "x" if peer == PEERS[-1] else "k"
            self.workers[peer] = Worker(kind)
            self.cluster.handle(
                PeerUp(peer, Role.WORKER, WorkerInfo(kind, ModelInfo("m", 100, TOTAL))), self.cluster.now
            )
            self.report(peer, 0)

    def down(self, peer: Peer, _: int) -> None:
        del self.workers[peer]
        self.cluster.handle(PeerDown(peer), self.cluster.now)

    def add(self, peer: Peer, size: int) -> None:
        self.workers[peer].sizes.append(size)

    def grow(self, peer: Peer, by: int) -> None:
        self.workers[peer].sizes = [size + by for size in self.workers[peer].sizes]

    def finish(self, peer: Peer, number: int) -> None:
        del self.workers[peer].sizes[number : number + 1]

    def drain(self, peer: Peer, _: int) -> None:
        self.workers[peer].draining = True

    def fail(self, peer: Peer, _: int) -> None:
        if self.workers[peer].order is not None:
            self.workers[peer].num_failed += 1

    def move(self, peer: Peer, number: int) -> None:
        source = self.workers[peer]
        order = source.order
        if order is None or self.cluster.now >= source.until_s or number >= len(source.sizes):
            return
        destination = self.workers.get(order.destination)
        size = source.sizes[number]
        if destination is not None and size <= source.left:
            destination.sizes.append(source.sizes.pop(number))
            source.left -= size
            source.num_migrated += 1
            source.migrated_bytes += size

    def report(self, peer: Peer, _: int) -> None:
        worker = self.workers[peer]
        self.cluster.report(
            peer,
            sum(worker.sizes),
            len(worker.sizes),
            draining=worker.draining,
            num_migrated=worker.num_migrated,
            migrated_bytes=worker.migrated_bytes,
            num_migrations_failed=worker.num_failed,
        )

    def wait(self, _: Peer, quarters: int) -> None:
        for _number in range(quarters):
            self.cluster.now += 0.25
            pairing = self.state.pairing
            assert pairing is not None
            before = {view.peer: (view.free_bytes(), view.num_running) for view in self.state.fleet.views.values()}
            for effect in self.cluster.handle(Tick(), self.cluster.now):
                assert isinstance(effect, Send)
                assert isinstance(effect.message, MigrateTo)
                self.take(effect.to, effect.message, before)

    def take(self, peer: Peer, order: MigrateTo, before: Mapping[Peer, tuple[int, int]]) -> None:
        worker = self.workers[peer]
        worker.order, worker.until_s, worker.left = order, self.cluster.now + order.ttl_s, order.num_bytes
        if not order.num_bytes:
            return
        source, destination = self.cluster.view(peer), self.cluster.view(order.destination)
        assert source.report is not None
        assert destination.is_healthy
        assert destination.reserved_for is None
        assert source.kind == destination.kind
        free_bytes, num_running = before[order.destination]
        assert free_bytes / max(1, num_running) > CONFIG.destination_above
        # With requests of the mean size the destination becomes neither a source nor fuller than the source.
        mean_bytes = max(1.0, source.report.kv_needed_bytes / source.report.num_running)
        num_after = max(1, num_running) + order.num_bytes / mean_bytes
        assert (free_bytes - order.num_bytes) / num_after >= CONFIG.source_until - 1e-6
        if not source.is_terminating:
            assert source.free_bytes() <= destination.free_bytes()
            assert (before[peer][0]) / max(1, before[peer][1]) < CONFIG.source_below

    def check(self) -> None:
        pairing = self.state.pairing
        assert pairing is not None
        sources = list(pairing.moves)
        destinations = [move.destination.peer for move in pairing.moves.values()]
        assert len(set(sources + destinations)) == 2 * len(pairing.moves), "no instance is in two moves"
        promised = dict.fromkeys(self.state.fleet.views, 0)
        for source, move in pairing.moves.items():
            assert self.state.fleet.views[source] is move.source
            assert self.state.fleet.views[move.destination.peer] is move.destination
            assert 0 <= move.left_bytes <= move.num_bytes
            promised[move.destination.peer] += move.left_bytes
        for peer, view in self.state.fleet.views.items():
            assert view.promised_bytes == promised[peer]


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=80))
def test_pairing_holds_under_random_events(events: list[tuple[str, Peer, int]]) -> None:
    """No instance sends and receives at once, or gets more than it can take; and no promised bytes remain."""
    cluster = Random()
    for name, peer, number in events:
        cluster.event(name, peer, number)
    for worker in cluster.workers.values():
        worker.sizes.clear()
    for peer in cluster.workers:
        cluster.report(peer, 0)
    cluster.wait(A, 1 + ceil(CONFIG.ttl_s / 0.25))
    cluster.check()
    assert cluster.state.pairing is not None
    assert not cluster.state.pairing.moves
    assert all(view.freeness() in (TOTAL, -inf) for view in cluster.state.fleet.views.values())

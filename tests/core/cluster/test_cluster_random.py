"""The coordinator under random events: what late binding promises holds after each of them."""

from collections import Counter

from hypothesis import given, settings, strategies as st

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import Send
from actorserve.core.messages import (
    LoadReport,
    MigrateTo,
    ModelInfo,
    Peer,
    PeerDown,
    PeerUp,
    Place,
    Placed,
    RefusalReason,
    Refused,
    Role,
    Tick,
    Unplace,
    WorkerInfo,
)
from actorserve.core.migration.pairing import PairingConfig
from actorserve.core.placement.fleet import Fleet, InstanceView
from tests.core.harness.coordinator import GATEWAY, SPEED, A, Coordinator

MAX_QUEUE = 3
PEERS = tuple(Peer(f"worker-{i}", 1) for i in range(3))
LATE = {0: 1.0, 1: 2.0}


def chosen_by_definition(fleet: Fleet, place: Place) -> InstanceView | None:
    """The freest of those that admit the request, of its own kind where any of that could ever hold it.

    Who holds its prefix is freer by that.
    """
    views = list(fleet.views.values())
    saved = fleet.prefixes.holders(place.prefix_names)
    able = [view for view in views if place.num_tokens <= view.capacity_tokens and view.peer != place.avoid]
    own = [view for view in able if place.kind and view.kind == place.kind]
    open_ = [
        view
        for view in own or able
        if place.num_tokens <= view.room_tokens(MAX_QUEUE)
        and (view.reserved_for is None or view.reserved_for.request_id == place.request_id)
    ]

    def freeness(view: InstanceView) -> float:
        return view.freeness(min(saved.get(view.peer, 0), place.num_tokens))

    return max(open_, key=lambda view: (freeness(view), view.peer), default=None)


EVENTS = st.one_of(
    st.tuples(
        st.just("place"),
        st.integers(0, 30),  # which request
        st.integers(1, 1000),
        st.sampled_from([0, 0, 0, 1]),
        st.sampled_from(["", "", "x", "y"]),
        st.sampled_from([None, None, *PEERS]),
        st.sampled_from([(), (), ("x",), ("x", "y"), ("z",)]),
    ),
    st.tuples(
        st.just("report"),
        st.sampled_from(PEERS),
        st.integers(-200, 1000),
        st.integers(0, MAX_QUEUE),
        st.sampled_from([1000, 1000, 1000, 600, 0]),
        st.booleans(),
    ),
    st.tuples(st.sampled_from(["unplace", "again"]), st.integers(0, 30)),
    st.tuples(st.sampled_from(["up", "down"]), st.sampled_from(PEERS)),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.5, 1.0, 6.0])),
)


class Checked:
    """Coordinator under random events; after each of them what late binding promises is checked."""

    def __init__(self, migration: PairingConfig | None) -> None:
        config = ClusterConfig(8, 1.0, MAX_QUEUE, promote_after_s_of=LATE, report_ttl_s=5.0, migration=migration)
        self.state = ClusterState(config)
        self.now = 0.0
        self.sequence = 0
        self.asked: dict[str, Place] = {}  # and neither answered nor taken back
        self.since_s: dict[str, float] = {}
        self.num_asked: Counter[str] = Counter()
        for peer in PEERS:
            self.event("up", peer)

    def event(self, name: str, *values: object) -> None:
        getattr(self, name)(*values)
        self.check()

    def handle(self, message: object, sender: Peer | None = None) -> None:
        views = {peer: view.freeness() for peer, view in self.state.instances.items()}
        effects = self.state.handle(message, self.now, sender)  # type: ignore[arg-type]
        for effect in effects:
            assert isinstance(effect, Send)
            answer = effect.message
            if isinstance(answer, MigrateTo):
                continue
            assert isinstance(answer, Placed | Refused)
            place = self.asked.pop(answer.request_id)
            assert answer.epoch == place.epoch
            if isinstance(answer, Placed):
                assert answer.waited_s == self.now - self.since_s[answer.request_id]
                assert answer.instance in views
                assert self.state.instances[answer.instance].is_healthy
                assert answer.instance != place.avoid
            else:
                assert answer.reason is RefusalReason.TOO_LARGE or len(self.state.waiting) == 8
                assert 1.0 <= answer.retry_after_s <= 60.0

    def place(
        self, number: int, num_tokens: int, priority: int, kind: str, avoid: Peer | None, names: tuple[str, ...]
    ) -> None:
        name = f"r{number}"
        self.num_asked[name] += 1
        self.asked[name] = Place(name, self.num_asked[name], num_tokens, priority, kind, avoid, prefix_names=names)
        self.since_s[name] = self.now
        self.state.fleet.expire_reports(self.now)
        expected = chosen_by_definition(self.state.fleet, self.asked[name])
        known = self.state.fleet.placement(name) or self.state.waiting.get(name)
        self.handle(self.asked[name], GATEWAY)
        if known is None and expected is not None:  # else what it leaves may change where it fits
            placement = self.state.fleet.placement(name)
            assert placement is not None
            assert placement.placed.instance == expected.peer

    def again(self, number: int) -> None:
        place = self.asked.get(f"r{number}")
        if place is not None:
            self.handle(place, GATEWAY)

    def unplace(self, number: int) -> None:
        self.asked.pop(f"r{number}", None)
        self.handle(Unplace(f"r{number}", self.num_asked[f"r{number}"]), GATEWAY)

    def report(self, peer: Peer, room: int, waiting: int, total: int, accepts: bool) -> None:
        if peer in self.state.instances:
            self.sequence += 1
            accepted = tuple(self.state.instances[peer].in_flight) if accepts else ()
            fields = {"kv_needed_bytes": total - room, "accepted": accepted, "draining": room == 999}
            report = LoadReport(self.sequence, waiting, waiting, total, 0, 0, 10, 10, 0, **fields)  # type: ignore[arg-type]
            self.handle(report, peer)

    def up(self, peer: Peer) -> None:
        if peer not in self.state.instances:
            kind = "x" if peer == PEERS[0] else "y"
            self.handle(PeerUp(peer, Role.WORKER, WorkerInfo(kind, ModelInfo("m", 100, 900), SPEED)))

    def down(self, peer: Peer) -> None:
        self.handle(PeerDown(peer))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        deadline = self.state.next_deadline()
        if deadline is not None and deadline <= self.now:
            self.handle(Tick())

    def check(self) -> None:
        views = list(self.state.instances.values())
        # No request is lost: whoever has no answer waits, once.
        assert set(self.state.waiting) == set(self.asked)
        assert sorted(self.state.line.order(self.now)) == sorted(self.asked)
        # Nobody waits who could go somewhere.
        for waiting in self.state.waiting.values():
            assert chosen_by_definition(self.state.fleet, waiting.place) is None
            assert self.state.fleet.choose(waiting.place) is None
        # Nothing is kept but for those who wait, have waited long, and could be held there.
        for view in views:
            if view.reserved_for is not None:
                place = self.state.waiting[view.reserved_for.request_id].place
                assert place == view.reserved_for
                assert self.now - self.since_s[place.request_id] >= LATE[place.priority]
                assert place.num_tokens <= view.capacity_tokens
                assert view.is_healthy
        reserving_ids = [view.reserved_for.request_id for view in views if view.reserved_for is not None]
        assert len(set(reserving_ids)) == len(reserving_ids)
        # The accounts agree with what they are made of.
        for view in views:
            assert view.num_blocks_in_flight == sum(each.num_blocks for each in view.in_flight.values())
        shortest = min((each.place.num_tokens for each in self.state.waiting.values()), default=None)
        assert self.state.line.shortest_tokens() == shortest
        in_flight = [each.expires_s for view in views for each in view.in_flight.values()]
        deadline = self.state.next_deadline()
        if self.state.pairing is None:
            assert deadline == min(in_flight, default=None)
        else:
            assert (deadline is None) == (not in_flight and len(views) < 2)
            assert deadline is None or deadline <= min([*in_flight, self.now + 0.25]) or len(views) < 2


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=60), st.booleans())
def test_late_binding_holds_under_random_events(events: list[tuple[object, ...]], migrates: bool) -> None:
    """Whatever happens, nobody is lost, nobody waits who could go, and each goes where the plain definition says."""
    checked = Checked(PairingConfig(100.0, 200.0, 300.0) if migrates else None)
    for name, *values in events:
        checked.event(str(name), *values)


LOADS = st.tuples(
    st.integers(0, 11),
    st.sampled_from([0, 0, 0, 100, 300, 500]),  # room
    st.integers(0, 1000),  # virtual usage
    st.integers(1, 3),  # running
)


@settings(max_examples=100, deadline=None)
@given(st.lists(LOADS, min_size=12, max_size=30), st.lists(st.integers(1, 600), min_size=1, max_size=10))
def test_the_freest_that_admits_is_found_however_many_have_room(
    loads: list[tuple[int, int, int, int]], sizes: list[int]
) -> None:
    """Of a dozen instances the choice is the plain definition's, after any reports and placements."""
    fleet = Fleet(MAX_QUEUE, 5.0)
    for number in range(12):
        fleet.add(InstanceView(Peer(f"worker-{number}", 1), "k", ModelInfo("m", 100, 1000)))
    for sequence, (number, room, usage, num_running) in enumerate(loads):
        report = LoadReport(sequence, num_running, 0, 1000, 0, usage, 10, 10, 0, kv_needed_bytes=1000 - room)
        fleet.on_report(Peer(f"worker-{number}", 1), report, 0.0)
    for number, num_tokens in enumerate(sizes):
        place = Place(f"r{number}", 1, num_tokens, prefix_names=("1" * 16, "2" * 16)[: number % 3])
        view = fleet.choose(place)
        assert view == chosen_by_definition(fleet, place)
        if view is not None:
            fleet.place(view, GATEWAY, place, 0.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 2)), min_size=1, max_size=20))
def test_the_order_is_by_class_and_level_and_stable(requests: list[tuple[int, int]]) -> None:
    """Of those that wait and are not promoted, classes come first, then levels, then who came first."""
    coordinator = Coordinator(A, promote_after_s=100.0)
    coordinator.report(A, 0)
    for number, (num_tokens, priority) in enumerate(requests):
        coordinator.place(f"r{number}", num_tokens, float(number), priority=priority)

    def level(num_tokens: int) -> int:
        needed_s, level = max(1.0, num_tokens / 100), 0
        while 2**level < needed_s:
            level += 1
        return level

    by_definition = sorted(
        range(len(requests)), key=lambda number: (requests[number][1], level(requests[number][0]), number)
    )
    assert list(coordinator.state.line.order(50.0)) == [f"r{number}" for number in by_definition]

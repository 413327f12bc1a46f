"""A coordinator under random events: late binding's guarantees are checked after each event."""

from collections import Counter
from dataclasses import replace

from hypothesis import strategies as st

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
from actorserve.core.placement.fleet import Fleet
from actorserve.core.placement.instance_view import InstanceView
from tests.core.harness.coordinator import SPEED
from tests.core.harness.fleets import GATEWAY

MAX_QUEUE = 3
WORKERS = tuple(Peer(f"worker-{i}", 1) for i in range(3))
PROMOTE_AFTER_S = {0: 1.0, 1: 2.0}


def chosen_by_definition(fleet: Fleet, place: Place) -> InstanceView | None:
    """The freest instance that admits the request, of the request's kind if any instance of that kind could ever hold
    it.

    An instance that holds a prefix of the prompt counts as freer by the tokens saved.
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
        return view.dispatch_freeness(min(saved.get(view.peer, 0), place.num_tokens))

    return max(open_, key=lambda view: (freeness(view), view.peer), default=None)


EVENTS = st.one_of(
    st.tuples(
        st.just("place"),
        st.integers(0, 30),  # which request
        st.integers(1, 1000),
        st.sampled_from([0, 0, 0, 1]),
        st.sampled_from(["", "", "x", "y"]),
        st.sampled_from([None, None, *WORKERS]),
        st.sampled_from([(), (), ("x",), ("x", "y"), ("z",)]),
    ),
    st.tuples(
        st.just("report"),
        st.sampled_from(WORKERS),
        st.integers(-200, 1000),
        st.integers(0, MAX_QUEUE),
        st.sampled_from([1000, 1000, 1000, 600, 0]),
        st.booleans(),
    ),
    st.tuples(st.sampled_from(["unplace", "again"]), st.integers(0, 30)),
    st.tuples(st.sampled_from(["up", "down"]), st.sampled_from(WORKERS)),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.5, 1.0, 6.0])),
)


class CheckedCluster:
    """A coordinator that takes random events. After each one it checks its invariants and what late binding promises.

    The events are methods: "place", "report", "again", "unplace", "up", "down" and "wait".
    """

    def __init__(self, migration: PairingConfig | None) -> None:
        config = ClusterConfig(
            8, 1.0, MAX_QUEUE, promote_after_s_of=PROMOTE_AFTER_S, report_ttl_s=5.0, migration=migration
        )
        self.config = config
        self.state = ClusterState(config)
        self.handled: list[tuple[object, float, Peer | None]] = []
        self.now = 0.0
        self.sequence = 0
        self.asked: dict[str, Place] = {}  # neither answered nor taken back
        self.since_s: dict[str, float] = {}
        self.num_asked: Counter[str] = Counter()
        for peer in WORKERS:
            self.event("up", peer)

    def event(self, name: str, *values: object) -> None:
        getattr(self, name)(*values)
        self.check()

    def handle(self, message: object, sender: Peer | None = None) -> None:
        known = set(self.state.fleet.instances)
        self.handled.append((message, self.now, sender))
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
                assert answer.instance in known
                assert self.state.fleet.views[answer.instance].is_healthy
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
        known = self.state.fleet.placement(name) or self.state.waiting.get(name)
        expected = None if known else self.expected(self.asked[name])
        self.handle(self.asked[name], GATEWAY)
        if expected is not None:
            placement = self.state.fleet.placement(name)
            assert placement is not None
            assert placement.placed.instance == expected

    def expected(self, place: Place) -> Peer | None:
        """The instance to which a new request goes by the definition; None if no instance admits it.

        Requests that wait come first: an instance may be reserved in the same call for one that is overdue by now. So
        the definition is applied after a like request has come and gone.
        """
        before_it = ClusterState(self.config)  # in the same state, because the core is deterministic
        for message, now, sender in self.handled:
            before_it.handle(message, now, sender)  # type: ignore[arg-type]
        before_it.handle(replace(place, request_id="like", prefix_names=()), self.now, GATEWAY)
        before_it.handle(Unplace("like", place.epoch), self.now, GATEWAY)
        chosen = chosen_by_definition(before_it.fleet, place)
        return None if chosen is None else chosen.peer

    def again(self, number: int) -> None:
        place = self.asked.get(f"r{number}")
        if place is not None:
            self.handle(place, GATEWAY)

    def unplace(self, number: int) -> None:
        self.asked.pop(f"r{number}", None)
        self.handle(Unplace(f"r{number}", self.num_asked[f"r{number}"]), GATEWAY)

    def report(self, peer: Peer, room: int, waiting: int, total: int, accepts: bool) -> None:
        if peer in self.state.fleet.instances:
            self.sequence += 1
            view = self.state.fleet.views.get(peer)
            accepted = tuple(view.in_flight) if accepts and view is not None else ()
            fields = {"kv_needed_bytes": total - room, "accepted": accepted, "draining": room == 999}
            report = LoadReport(self.sequence, waiting, waiting, total, 0, 0, 10, 10, 0, **fields)  # type: ignore[arg-type]
            self.handle(report, peer)

    def up(self, peer: Peer) -> None:
        if peer not in self.state.fleet.instances:
            kind = "x" if peer == WORKERS[0] else "y"
            self.handle(PeerUp(peer, Role.WORKER, WorkerInfo(kind, ModelInfo("m", 100, 900), SPEED)))

    def down(self, peer: Peer) -> None:
        self.handle(PeerDown(peer))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        deadline = self.state.next_deadline()
        if deadline is not None and deadline <= self.now:
            self.handle(Tick())

    def check(self) -> None:
        self.state.validate()
        views = list(self.state.fleet.views.values())
        # No request is lost: a request without an answer waits, once.
        assert set(self.state.waiting) == set(self.asked)
        assert sorted(self.state.queue.order(self.now)) == sorted(self.asked)
        # No request waits that an instance admits.
        for waiting in self.state.waiting.values():
            assert chosen_by_definition(self.state.fleet, waiting.place) is None
            assert self.state.fleet.choose(waiting.place) is None
        # An instance is reserved only for a request that has waited long enough.
        for view in views:
            if view.reserved_for is not None:
                place = self.state.waiting[view.reserved_for.request_id].place
                assert place == view.reserved_for
                assert self.now - self.since_s[place.request_id] >= PROMOTE_AFTER_S[place.priority]
        # Values that the cores keep for speed agree with their definitions.
        expiries_s = [placement.expires_s for view in views for placement in view.in_flight.values()]
        deadline = self.state.next_deadline()
        if self.state.pairing is None:
            assert deadline == min(expiries_s, default=None)
        else:
            assert (deadline is None) == (not expiries_s and len(self.state.fleet.instances) < 2)
            is_alone = len(self.state.fleet.instances) < 2
            assert deadline is None or deadline <= min([*expiries_s, self.now + 0.25]) or is_alone

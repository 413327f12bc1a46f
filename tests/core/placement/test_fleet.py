"""Freeness and dispatch: the definitions of Llumnix's Algorithm 1, and the dispatcher's own account."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import Send
from actorserve.core.kv.block_allocator import blocks_for
from actorserve.core.messages import (
    LoadReport,
    ModelInfo,
    Peer,
    PeerDown,
    PeerUp,
    Place,
    Placed,
    RefusalReason,
    Refused,
    RequestSpec,
    Role,
    SamplingParams,
    Tick,
    Unplace,
    WorkerInfo,
)
from actorserve.core.placement.baselines import ORDERS
from actorserve.core.placement.fleet import Fleet, InstanceView
from actorserve.core.placement.freeness import freeness, virtual_usage_bytes
from actorserve.core.request import Request

GATEWAY = Peer("gateway-0", 1)
MODEL = ModelInfo("m", 100, 1000)
X, Y = "1" * 16, "2" * 16  # names of prefixes


def request(num_tokens: int, blocks: int, priority: int = 0) -> Request:
    spec = RequestSpec("r", (1,) * num_tokens, SamplingParams(0, 5), priority=priority)
    made = Request(spec, 1, GATEWAY)
    made.blocks = list(range(blocks))
    return made


def wanted(request: Request) -> int:
    """Blocks of four tokens, of which nothing is cached."""
    return blocks_for(len(request.token_ids), 4)


def report(sequence: int = 0, used: int = 0, running: int = 0, **fields: object) -> LoadReport:
    return LoadReport(sequence, running, 0, 1000, used, used, 10, 4, 0, **fields)  # type: ignore[arg-type]


def view(name: str, kind: str = "k", **fields: int) -> InstanceView:
    return InstanceView(Peer(name, 1), kind, MODEL, report(**fields))


def fleet_of(views: Sequence[InstanceView], dispatch: str = "freeness", max_queue: int | None = 64) -> Fleet:
    fleet = Fleet(max_queue, placement_ttl_s=5.0, report_ttl_s=1.0, order=ORDERS[dispatch])
    for each in views:
        fleet.add(each)
    return fleet


def choose_instance(views: Sequence[InstanceView], place: Place) -> InstanceView | None:
    """What a fleet of these answers."""
    return fleet_of(views).choose(place)


def test_virtual_usage_counts_held_blocks_and_the_head_of_the_line() -> None:
    """Running requests count what they hold; of those waiting, only the first in order counts, with its demand."""
    order = [request(8, 2), request(9, 0), request(100, 0), request(4, 1)]
    assert virtual_usage_bytes(order, 3, wanted, 10, {}) == 3 * 10 + 3 * 10


def test_headroom_is_shared_by_the_requests_of_a_priority() -> None:
    """Each running request of a priority adds headroom over their number: in sum, the headroom once."""
    order = [request(4, 1, priority=1), request(4, 1, priority=1), request(4, 1)]
    assert virtual_usage_bytes(order, 3, wanted, 10, {1: 500}) == 30 + 500


def test_a_waiting_request_has_no_headroom() -> None:
    """Headroom is for those that run: one that waits counts at most its demand."""
    assert virtual_usage_bytes([request(4, 1), request(4, 0, priority=1)], 1, wanted, 10, {1: 500}) == 10 + 10


def test_freeness_is_what_is_left_a_running_request() -> None:
    """F = (M - V) / max(1, B), negative when demand exceeds memory, minus infinity when terminating."""
    assert freeness(1000, 400, 3) == 200
    assert freeness(1000, 400, 0) == 600
    assert freeness(1000, 1400, 2) == -200
    assert freeness(1000, 0, 0, terminating=True) == float("-inf")


def test_dispatch_goes_to_the_freest() -> None:
    """The highest freeness wins."""
    chosen = choose_instance([view("a", used=500, running=2), view("b", used=500, running=4)], Place("r", 1, 4))
    assert chosen is not None
    assert chosen.peer.name == "a"


def test_dispatch_goes_where_the_request_fits() -> None:
    """A busy instance that can hold the request goes before a free one that never can."""
    free, busy = view("a"), view("b", used=900, running=9)
    free.model = ModelInfo("m", 100, 50)
    assert choose_instance([free, busy], Place("r", 1, 51)) is busy
    assert choose_instance([free, busy], Place("r", 1, 50)) is free


def test_dispatch_goes_where_memory_is_not_short() -> None:
    """An instance whose usable memory cannot hold the request gets it never, however idle."""
    short, busy = view("a"), view("b", kind="y", used=990, running=9)
    short.report = replace(report(), kv_total_bytes=500, host_total_bytes=1000)
    assert choose_instance([short, busy], Place("r", 1, 201)) is busy
    assert choose_instance([short, busy], Place("r", 2, 201, kind="k")) is busy
    assert choose_instance([short, busy], Place("r", 1, 200)) is short
    assert choose_instance([short], Place("r", 1, 201)) is None


def test_dispatch_goes_where_started_requests_leave_room() -> None:
    """The request must fit beside the KV of all started requests, in device and host memory together."""
    full = view("a")
    full.report = report(used=1000, kv_needed_bytes=1200, host_total_bytes=500)
    assert choose_instance([full], Place("r", 1, 121)) is None
    assert choose_instance([full], Place("r", 1, 120)) is full
    full.report = report(used=1000, kv_needed_bytes=1600, host_total_bytes=500)
    assert choose_instance([full], Place("r", 1, 1)) is None


def test_dispatch_goes_where_few_wait() -> None:
    """An instance whose queue has reached its bound gets nothing, however much memory is free."""
    long, busy = view("a"), view("b", used=500, running=9)
    long.report = replace(report(), num_waiting=64)
    assert choose_instance([long, busy], Place("r", 1, 4)) is busy
    long.report = replace(report(), num_waiting=63)
    assert choose_instance([long, busy], Place("r", 1, 4)) is long


def test_a_request_waits_for_its_kind() -> None:
    """While an instance of its kind could hold it, a request that moves waits for that one, and goes to no other."""
    full, free = view("a", kind="x"), view("b", kind="y")
    full.report = report(kv_needed_bytes=1000)
    assert choose_instance([full, free], Place("r", 2, 4, kind="x")) is None
    assert choose_instance([full, free], Place("r", 2, 4)) is free
    full.report = report(kv_needed_bytes=1000, draining=True)
    assert choose_instance([full, free], Place("r", 2, 4, kind="x")) is free


def test_dispatch_prefers_the_kind_that_made_the_tokens() -> None:
    """A request that moves stays within its kind while one of it is there, even a busier one."""
    busy, free = view("a", kind="x", used=900, running=9), view("b", kind="y")
    place = Place("r", 2, 4, kind="x")
    assert choose_instance([busy, free], place) is busy
    assert choose_instance([free], place) is free


def test_dispatch_avoids_the_instance_that_failed_the_draining_and_the_silent() -> None:
    """Never to the instance that just failed the request, nor to one that terminates or has not reported."""
    failed, silent = view("a"), InstanceView(Peer("b", 1), "k", MODEL)
    draining = InstanceView(Peer("c", 1), "k", MODEL, report(draining=True))
    assert choose_instance([failed, silent, draining], Place("r", 2, 4, avoid=failed.peer)) is None


class Coordinator:
    """A ClusterState with two instances that have reported."""

    def __init__(self, num_instances: int = 2, **config: Any) -> None:
        self.state = ClusterState(ClusterConfig(max_waiting_requests=2, retry_s=1.0, **config))
        self.workers = [Peer(f"worker-{i}", 1) for i in range(num_instances)]
        for peer in self.workers:
            self.state.handle(PeerUp(peer, Role.WORKER, WorkerInfo("k", MODEL)), 0.0)
            self.state.handle(report(), 0.0, peer)

    def place(self, name: str, num_tokens: int = 40, epoch: int = 1, now: float = 0.0) -> Placed:
        (effect,) = self.state.handle(Place(name, epoch, num_tokens), now, GATEWAY)
        assert isinstance(effect, Send)
        assert isinstance(effect.message, Placed)
        return effect.message


def test_burst_between_two_reports_is_spread() -> None:
    """Placements not yet reported count as load, so a burst does not pile up on one instance."""
    coordinator = Coordinator()
    names = [coordinator.place(f"r{i}").instance.name for i in range(6)]
    assert names.count("worker-0") == 3


def test_report_takes_over_from_the_account() -> None:
    """What a newer report has seen is no longer counted twice; an old report changes nothing."""
    coordinator = Coordinator(1)
    worker = coordinator.workers[0]
    coordinator.place("r1")
    instance = coordinator.state.instances[worker]
    assert instance.freeness() == 1000 - 100
    coordinator.state.handle(report(1, used=100, running=1, accepted=("r1",)), 0.1, worker)
    assert instance.freeness() == 900
    coordinator.state.handle(report(1, used=0), 0.2, worker)
    assert instance.freeness() == 900


def test_a_report_confirms_only_what_was_placed_there() -> None:
    """A request that one instance accepted late still counts as under way to the one that it was placed on since."""
    coordinator = Coordinator(2)
    first = coordinator.place("r1").instance
    effects = coordinator.state.handle(Place("r1", 2, 40, avoid=first), 0.0, GATEWAY)
    (other,) = (peer for peer in coordinator.workers if peer != first)
    assert effects == [Send(GATEWAY, Placed("r1", 2, other))]
    coordinator.state.handle(report(1, accepted=("r1",)), 0.1, first)
    assert list(coordinator.state.instances[other].in_flight) == ["r1"]


def test_what_is_under_way_counts_as_if_it_ran() -> None:
    """Placements not yet reported add their demand to V and their number to B."""
    coordinator = Coordinator(1)
    coordinator.place("r1")
    coordinator.place("r2")
    (instance,) = coordinator.state.instances.values()
    assert instance.freeness() == (1000 - 200) / 2


def test_account_of_a_lost_placement_expires() -> None:
    """A placement that no report ever confirms stops counting."""
    coordinator = Coordinator(1)
    coordinator.place("r1")
    deadline = coordinator.state.next_deadline()
    assert deadline == 5.0
    coordinator.state.handle(Tick(), 5.0)
    assert coordinator.state.next_deadline() is None


def test_place_may_be_repeated() -> None:
    """The same question gets the same answer and counts once; a new epoch is a new question."""
    coordinator = Coordinator()
    first = coordinator.place("r1")
    assert coordinator.place("r1") == first
    assert sum(len(view.in_flight) for view in coordinator.state.instances.values()) == 1
    coordinator.place("r1", epoch=2)
    assert sum(len(view.in_flight) for view in coordinator.state.instances.values()) == 1


def test_a_question_of_an_older_epoch_is_dropped() -> None:
    """A request counts once, under its newest epoch, whatever the order in which its questions come."""
    coordinator = Coordinator(1)
    coordinator.place("r1", epoch=2)
    assert coordinator.state.handle(Place("r1", 1, 40), 0.0, GATEWAY) == []
    newest = coordinator.place("r1", epoch=3)
    (view,) = coordinator.state.instances.values()
    assert view.num_blocks_in_flight == 10
    assert coordinator.place("r1", epoch=3) == newest
    waiting = Coordinator(0).state
    waiting.handle(Place("r1", 2, 4), 0.0, GATEWAY)
    waiting.handle(Place("r1", 1, 4), 0.0, GATEWAY)
    assert waiting.waiting["r1"].place.epoch == 2


def test_requests_wait_for_an_instance_up_to_a_bound() -> None:
    """With nobody there requests wait, and past the bound they are refused; who gives up makes room."""
    coordinator = Coordinator(0)
    state = coordinator.state
    assert state.handle(Place("r1", 1, 4), 0.0, GATEWAY) == []
    assert state.handle(Place("r2", 1, 4), 0.0, GATEWAY) == []
    refused = Refused("r3", 1, RefusalReason.OVERLOADED, 1.0)
    assert state.handle(Place("r3", 1, 4), 0.0, GATEWAY) == [Send(GATEWAY, refused)]
    state.handle(Unplace("r2", 1), 1.0, GATEWAY)
    assert list(state.waiting) == ["r1"]
    assert state.handle(Place("r3", 1, 4), 1.0, GATEWAY) == []


def test_waiting_requests_go_to_the_first_instance_that_reports() -> None:
    """A worker that joins takes what waits, in order of arrival."""
    coordinator = Coordinator(0)
    state = coordinator.state
    state.handle(Place("r1", 1, 4), 0.0, GATEWAY)
    state.handle(Place("r2", 1, 4), 0.0, GATEWAY)
    worker = Peer("worker-0", 1)
    assert state.handle(PeerUp(worker, Role.WORKER, WorkerInfo("k", MODEL)), 1.0) == []
    effects = state.handle(report(), 1.0, worker)
    assert effects == [Send(GATEWAY, Placed("r1", 1, worker, 1.0)), Send(GATEWAY, Placed("r2", 1, worker, 1.0))]


def test_dead_peers_are_forgotten() -> None:
    """A dead worker gets nothing more; a dead gateway's requests neither wait nor count."""
    coordinator = Coordinator(1)
    coordinator.place("r1")
    coordinator.state.handle(PeerDown(GATEWAY), 0.0)
    assert not coordinator.state.instances[coordinator.workers[0]].in_flight
    coordinator.state.handle(PeerDown(coordinator.workers[0]), 0.0)
    assert coordinator.state.handle(Place("r2", 1, 4), 0.0, GATEWAY) == []
    coordinator.state.handle(PeerDown(GATEWAY), 0.0)
    assert not coordinator.state.waiting


def test_too_large_for_every_instance_is_refused_at_once() -> None:
    """A request that no known instance can ever hold does not wait."""
    coordinator = Coordinator()
    effects = coordinator.state.handle(Place("r1", 1, 1001), 0.0, GATEWAY)
    assert effects == [Send(GATEWAY, Refused("r1", 1, RefusalReason.TOO_LARGE, 1.0))]


def test_a_repeated_place_keeps_its_turn_and_may_avoid_another() -> None:
    """A question asked again while it waits is answered by what it says now, and not behind those that came later."""
    coordinator = Coordinator(1)
    (worker,) = coordinator.workers
    state = coordinator.state
    assert state.handle(Place("r1", 2, 4, avoid=worker), 0.0, GATEWAY) == []
    assert state.handle(Place("r2", 2, 4, avoid=worker), 0.0, GATEWAY) == []
    assert list(state.waiting) == ["r1", "r2"]
    assert state.handle(Place("r1", 2, 4, avoid=worker), 1.0, GATEWAY) == []
    assert list(state.waiting) == ["r1", "r2"]
    assert state.handle(Place("r2", 2, 4), 1.0, GATEWAY) == [Send(GATEWAY, Placed("r2", 2, worker, 1.0))]
    assert list(state.waiting) == ["r1"]


def test_a_new_epoch_waits_anew() -> None:
    """A request that asks under a newer epoch goes behind those that wait."""
    state = Coordinator(0).state
    state.handle(Place("r1", 1, 4), 0.0, GATEWAY)
    state.handle(Place("r2", 1, 4), 1.0, GATEWAY)
    state.handle(Place("r1", 2, 4), 5.0, GATEWAY)
    assert list(state.waiting) == ["r2", "r1"]


def test_the_deadline_is_the_earliest_and_its_tick_clears_it() -> None:
    """Every Tick at the deadline moves it forward, until nothing is under way."""
    coordinator = Coordinator(2)
    state = coordinator.state
    coordinator.place("r1", now=1.0)
    coordinator.place("r2", now=2.0)
    coordinator.place("r3", now=3.0)
    coordinator.place("r1", epoch=2, now=4.0)
    deadlines = []
    while (deadline := state.next_deadline()) is not None:
        deadlines.append(deadline)
        state.handle(Tick(), deadline)
    assert deadlines == [7.0, 8.0, 9.0]
    assert [view.num_blocks_in_flight for view in state.instances.values()] == [0, 0]


def test_reports_of_strangers_are_counted() -> None:
    """A load report of an instance that is not up changes nothing."""
    coordinator = Coordinator(0)
    assert coordinator.state.handle(report(), 0.0, Peer("worker-9", 1)) == []
    assert coordinator.state.num_stale_messages == 1
    assert not coordinator.state.instances


def test_unplace_takes_a_placement_back_but_not_a_newer_one() -> None:
    """What was placed for a client that left counts no more; an Unplace of an older epoch changes nothing."""
    coordinator = Coordinator(1)
    (view,) = coordinator.state.instances.values()
    coordinator.place("r1", epoch=2)
    coordinator.state.handle(Unplace("r1", 1), 0.0, GATEWAY)
    assert view.num_blocks_in_flight == 10
    coordinator.state.handle(Unplace("r1", 2), 0.0, GATEWAY)
    assert view.num_blocks_in_flight == 0
    assert not view.in_flight
    state = Coordinator(0).state
    state.handle(Place("r1", 2, 4), 0.0, GATEWAY)
    state.handle(Unplace("r1", 1), 0.0, GATEWAY)
    assert list(state.waiting) == ["r1"]


def test_ties_end_on_the_name() -> None:
    """Of equally free instances the one with the greatest name is chosen, in whatever order they are known."""
    views = [view("b"), view("c"), view("a")]
    for order in (views, views[::-1]):
        chosen = choose_instance(order, Place("r", 1, 4))
        assert chosen is not None
        assert chosen.peer.name == "c"


def test_the_instance_with_the_prefix_is_freer_by_what_it_saves() -> None:
    """An instance that holds the prompt's beginning is chosen as long as that outweighs its load, and no longer."""
    names = (X, Y)  # stand for 64 and 128 tokens
    for running, expected in ((4, "a"), (5, "b")):
        fleet = fleet_of([view("a", running=running), view("b", running=3, used=100)])
        fleet.prefixes.learn(Peer("a", 1), names, 1000)
        assert fleet.views[Peer("a", 1)].freeness() < fleet.views[Peer("b", 1)].freeness() == 300
        assert fleet.views[Peer("a", 1)].freeness(128) == (1000 + 320) / running
        chosen = fleet.choose(Place("r", 1, 200, prefix_names=names))
        assert chosen is not None
        assert chosen.peer.name == expected
        other = fleet.choose(Place("r", 1, 200))
        assert other is not None
        assert other.peer.name == "b"


def test_placements_teach_who_holds_a_prefix() -> None:
    """A second request with the same beginning follows the first while that costs nothing; a death is forgotten."""
    fleet = fleet_of([view("a", running=4), view("b", running=4)])
    first = fleet.choose(Place("r1", 1, 4))
    assert first is not None
    assert first.peer.name == "b"
    fleet.place(fleet.views[Peer("a", 1)], GATEWAY, Place("r1", 1, 100, prefix_names=(X,)), 0.0)
    fleet.on_report(Peer("a", 1), report(1, running=4, used=0, accepted=("r1",)), 0.0)
    second = fleet.choose(Place("r2", 1, 100, prefix_names=(X, Y)))
    assert second is not None
    assert second.peer.name == "a"
    fleet.remove(Peer("a", 1))
    third = fleet.choose(Place("r2", 1, 100, prefix_names=(X, Y)))
    assert third is not None
    assert third.peer.name == "b"


def test_a_prefix_changes_nothing_where_it_saves_nothing() -> None:
    """Fleets without a prefix cache, and the baselines, go by the load alone."""
    for fleet in (
        Fleet(64, 5.0, prefix_aware=False),
        Fleet(64, 5.0, order=ORDERS["least_loaded"]),
    ):
        fleet.add(view("a"))
        fleet.add(view("b"))
        fleet.prefixes.learn(Peer("a", 1), (X,), 1000)
        chosen = fleet.choose(Place("r", 1, 100, prefix_names=(X,)))
        assert chosen is not None
        assert chosen.peer.name == "b"


def test_who_is_silent_gets_nothing_until_it_reports_again() -> None:
    """A report counts for a while; then its instance is sent nothing, however busy the others are."""
    coordinator = Coordinator(2, report_ttl_s=1.0)
    state, (silent, busy) = coordinator.state, coordinator.workers
    state.handle(report(1, used=900, running=9, kv_needed_bytes=900), 0.9, busy)
    assert coordinator.place("r1", now=0.9).instance == silent
    assert coordinator.place("r2", now=1.0).instance == busy
    assert state.handle(Place("r3", 1, 200), 1.0, GATEWAY) == []  # the other has no room for it
    assert state.handle(report(1), 1.5, silent) == [Send(GATEWAY, Placed("r3", 1, silent, 0.5))]


def test_round_robin_goes_to_each_in_turn() -> None:
    """Each request goes to the instance that was sent nothing for longest, whatever the load; not to one that ends."""
    fleet = fleet_of([view("a", used=900, running=9), view("b"), view("c")], "round_robin", None)
    fleet.drain(fleet.views[Peer("c", 1)])
    chosen = []
    for number in range(4):
        place = Place(f"r{number}", 1, 200)
        found = fleet.choose(place)
        assert found is not None
        fleet.place(found, GATEWAY, place, 0.0)
        chosen.append(found.peer.name)
    assert chosen == ["b", "a", "b", "a"]


def test_least_loaded_counts_the_demand_of_all_who_wait() -> None:
    """Load is what running and waiting requests need, and what is under way, as a part of the memory."""
    views = [view("a"), view("b"), view("c")]
    views[0].report = report(kv_needed_bytes=500)
    views[1].report = report(kv_needed_bytes=100, kv_wanted_bytes=450)
    views[2].report = replace(report(kv_needed_bytes=900), kv_total_bytes=2000)
    fleet = fleet_of(views, "least_loaded", None)
    place = Place("r", 1, 4)
    assert fleet.choose(place) is views[2]
    fleet.place(views[2], GATEWAY, Place("r1", 1, 100), 0.0)  # 250 bytes more
    assert fleet.choose(place) is views[0]


def test_without_late_binding_requests_wait_on_instances() -> None:
    """A request goes at once to the best that could ever hold it, full as it is; and to none that is not healthy."""
    coordinator = Coordinator(2, late_binding=False, report_ttl_s=1.0)
    state, (one, other) = coordinator.state, coordinator.workers
    state.handle(report(1, used=1000, running=9, kv_needed_bytes=1000), 0.0, one)
    state.handle(report(1, used=1500, running=9, kv_needed_bytes=1000), 0.0, other)
    assert {coordinator.place(f"r{number}").instance for number in range(3)} == {one}
    state.handle(report(2, draining=True), 0.5, one)
    assert coordinator.place("r4").instance == other
    assert state.handle(Place("r5", 1, 4), 1.0, GATEWAY) == []  # both are silent or end
    assert list(state.waiting) == ["r5"]
    assert state.handle(report(2, used=2000), 1.1, other) == [Send(GATEWAY, Placed("r5", 1, other, 1.1 - 1.0))]


def test_what_migrations_bring_counts_until_reports_show_it() -> None:
    """An order's bytes count at the destination, less what it has reserved, where freeness and room are asked for."""
    destination, other = view("b", used=100, running=3), view("a", used=350, running=3)
    fleet = fleet_of([destination, other])
    fleet.promise(destination, 300)
    assert destination.free_bytes() == 600
    assert destination.room_tokens(64) == 280
    assert fleet.choose(Place("r", 1, 4)) is other
    fleet.on_report(destination.peer, report(1, used=300, running=3, kv_reserved_bytes=200), 0.0)
    assert destination.free_bytes() == 1000 - 300 - 100
    fleet.promise(destination, -300)
    assert destination.free_bytes() == 700
    assert fleet.choose(Place("r", 1, 4)) is destination

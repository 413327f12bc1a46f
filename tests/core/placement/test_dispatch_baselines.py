"""The dispatch rules that Llumnix compares with, and dispatch at once."""

from dataclasses import replace

from actorserve.core.effects import Send
from actorserve.core.messages import Peer, Place, Placed
from tests.core.harness.coordinator import A, Coordinator, SmallCluster
from tests.core.harness.fleets import GATEWAY, choose, fleet_of, report, view

X = "1" * 16  # name of a prefix


def test_a_prefix_changes_nothing_where_it_saves_nothing() -> None:
    """Without a prefix cache, and under the baselines, only the load counts."""
    views = [view("a"), view("b")]
    for fleet in (fleet_of(views, prefix_aware=False), fleet_of(views, "least_loaded")):
        fleet.prefixes.learn(Peer("a", 1), (X,), 1000)
        assert choose(fleet, Place("r", 1, 100, prefix_names=(X,))) == "b"


def test_round_robin_goes_to_each_in_turn() -> None:
    """Each request goes to the instance whose last placement is the oldest, whatever the load, but not to a terminating
    one.
    """
    fleet = fleet_of([view("a", used=900, running=9), view("b"), view("c")], "round_robin", None)
    fleet.drain(fleet.views[Peer("c", 1)])
    chosen = []
    for number in range(4):
        place = Place(f"r{number}", 1, 200)
        found = fleet.choose(place)
        assert found is not None
        fleet.place(found, GATEWAY, place, 0.0)
        fleet.validate()
        chosen.append(found.peer.name)
    assert chosen == ["b", "a", "b", "a"]


def test_least_loaded_counts_the_demand_of_all_waiting_requests() -> None:
    """Load is what running and waiting requests and placements in flight need, as a part of the memory."""
    views = [view("a"), view("b"), view("c")]
    views[0].report = report(kv_needed_bytes=500)
    views[1].report = report(kv_needed_bytes=100, kv_wanted_bytes=450)
    views[2].report = replace(report(kv_needed_bytes=900), kv_total_bytes=2000)
    fleet = fleet_of(views, "least_loaded", None)
    place = Place("r", 1, 4)
    assert choose(fleet, place) == "c"
    fleet.place(fleet.views[Peer("c", 1)], GATEWAY, Place("r1", 1, 100), 0.0)  # 250 bytes more
    assert choose(fleet, place) == "a"


def test_without_late_binding_room_goes_before_freeness() -> None:
    """A request goes to the freest instance with room for it now. If none has room, it waits at the freest of all."""
    few, many = view("few"), view("many")
    few.report = report(used=600, running=1, kv_needed_bytes=600)
    many.report = report(used=400, running=3, kv_needed_bytes=400)
    fleet = fleet_of([few, many], max_queue=None)
    assert choose(fleet, Place("r", 1, 160)) == "few"
    assert choose(fleet, Place("r", 1, 164)) == "many"
    assert choose(fleet, Place("r", 1, 244)) == "few"
    assert choose(fleet, Place("r", 1, 244, avoid=few.peer)) == "many"
    assert choose(fleet_of([few, many]), Place("r", 1, 244)) is None


def test_without_late_binding_a_request_waits_for_no_room_in_the_cluster() -> None:
    """A request that came before any instance was up goes to the first one that could hold it, even if that is full."""
    coordinator = Coordinator(A, late_binding=False)
    assert coordinator.place("r", 200) == []
    assert coordinator.report(A, 0) == [("r", "worker-0")]


def test_without_late_binding_requests_wait_on_instances() -> None:
    """A request goes at once to the best that could ever hold it, full as it is; and never to an unhealthy instance."""
    cluster = SmallCluster(2, late_binding=False, report_ttl_s=1.0)
    one, other = cluster.workers
    cluster.handle(report(1, used=1000, running=9, kv_needed_bytes=1000), 0.0, one)
    cluster.handle(report(1, used=1500, running=9, kv_needed_bytes=1000), 0.0, other)
    assert {cluster.place(f"r{number}").instance for number in range(3)} == {one}
    cluster.handle(report(2, draining=True), 0.5, one)
    assert cluster.place("r4").instance == other
    assert cluster.handle(Place("r5", 1, 4), 1.0, GATEWAY) == []  # both are silent or terminating
    assert list(cluster.state.waiting) == ["r5"]
    assert cluster.handle(report(2, used=2000), 1.1, other) == [Send(GATEWAY, Placed("r5", 1, other, 1.1 - 1.0))]

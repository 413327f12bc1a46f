"""The coordinator's core: its answers to gateways, and its account of what was placed."""

from actorserve.core.effects import Send
from actorserve.core.messages import (
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
from tests.core.harness.coordinator import SmallCluster
from tests.core.harness.fleets import GATEWAY, MODEL, report


def test_burst_between_two_reports_is_spread() -> None:
    """Placements not yet reported count as load, so a burst does not pile up on one instance."""
    cluster = SmallCluster()
    names = [cluster.place(f"r{i}").instance.name for i in range(6)]
    assert names.count("worker-0") == 3


def test_report_takes_over_from_the_account() -> None:
    """A placement that a newer report includes is not counted twice; an old report changes nothing."""
    cluster = SmallCluster(1)
    worker = cluster.workers[0]
    cluster.place("r1")
    instance = cluster.state.fleet.views[worker]
    assert instance.dispatch_freeness() == (1000 - 100) / (1 + 40)
    confirmed = report(1, used=100, running=1, pending_prompt_tokens=40, accepted=("r1",))
    cluster.handle(confirmed, 0.1, worker)
    assert instance.dispatch_freeness() == 900 / 41
    cluster.handle(report(1, used=0), 0.2, worker)
    assert instance.dispatch_freeness() == 900 / 41


def test_a_report_confirms_only_what_was_placed_there() -> None:
    """A request that one instance accepted late still counts as in flight to the one that it was placed on since."""
    cluster = SmallCluster(2)
    first = cluster.place("r1").instance
    effects = cluster.handle(Place("r1", 2, 40, avoid=first), 0.0, GATEWAY)
    (other,) = (peer for peer in cluster.workers if peer != first)
    assert effects == [Send(GATEWAY, Placed("r1", 2, other))]
    cluster.handle(report(1, accepted=("r1",)), 0.1, first)
    assert list(cluster.state.fleet.views[other].in_flight) == ["r1"]


def test_a_placement_in_flight_counts_as_a_running_request() -> None:
    """Placements not yet reported add their demand to V, and their number and the tokens of their prompts to B."""
    cluster = SmallCluster(1)
    cluster.place("r1")
    cluster.place("r2")
    (instance,) = cluster.state.fleet.views.values()
    assert instance.dispatch_freeness() == (1000 - 200) / (2 + 80)


def test_account_of_a_lost_placement_expires() -> None:
    """A placement that no report ever confirms stops counting."""
    cluster = SmallCluster(1)
    cluster.place("r1")
    deadline = cluster.state.next_deadline()
    assert deadline == 5.0
    cluster.handle(Tick(), 5.0)
    assert cluster.state.next_deadline() is None


def test_place_may_be_repeated() -> None:
    """A repeated Place gets the same answer and counts once; a new epoch gets a new answer."""
    cluster = SmallCluster()
    first = cluster.place("r1")
    assert cluster.place("r1") == first
    assert sum(len(view.in_flight) for view in cluster.state.fleet.views.values()) == 1
    cluster.place("r1", epoch=2)
    assert sum(len(view.in_flight) for view in cluster.state.fleet.views.values()) == 1


def test_a_place_of_an_older_epoch_is_dropped() -> None:
    """A request counts once, under its newest epoch, in whatever order its Places come."""
    cluster = SmallCluster(1)
    cluster.place("r1", epoch=2)
    assert cluster.handle(Place("r1", 1, 40), 0.0, GATEWAY) == []
    newest = cluster.place("r1", epoch=3)
    (view,) = cluster.state.fleet.views.values()
    assert view.num_blocks_in_flight == 10
    assert cluster.place("r1", epoch=3) == newest
    empty = SmallCluster(0)
    empty.handle(Place("r1", 2, 4), 0.0, GATEWAY)
    empty.handle(Place("r1", 1, 4), 0.0, GATEWAY)
    assert empty.state.waiting["r1"].place.epoch == 2


def test_requests_wait_for_an_instance_up_to_a_bound() -> None:
    """Without any instance requests wait, and past the bound they are refused; one that gives up makes room."""
    cluster = SmallCluster(0)
    assert cluster.handle(Place("r1", 1, 4), 0.0, GATEWAY) == []
    assert cluster.handle(Place("r2", 1, 4), 0.0, GATEWAY) == []
    refused = Refused("r3", 1, RefusalReason.OVERLOADED, 1.0)
    assert cluster.handle(Place("r3", 1, 4), 0.0, GATEWAY) == [Send(GATEWAY, refused)]
    cluster.handle(Unplace("r2", 1), 1.0, GATEWAY)
    assert list(cluster.state.waiting) == ["r1"]
    assert cluster.handle(Place("r3", 1, 4), 1.0, GATEWAY) == []


def test_waiting_requests_go_to_the_first_instance_that_reports() -> None:
    """A worker that joins gets the waiting requests, in order of arrival."""
    cluster = SmallCluster(0)
    cluster.handle(Place("r1", 1, 4), 0.0, GATEWAY)
    cluster.handle(Place("r2", 1, 4), 0.0, GATEWAY)
    worker = Peer("worker-0", 1)
    assert cluster.handle(PeerUp(worker, Role.WORKER, WorkerInfo("k", MODEL)), 1.0) == []
    effects = cluster.handle(report(), 1.0, worker)
    assert effects == [Send(GATEWAY, Placed("r1", 1, worker, 1.0)), Send(GATEWAY, Placed("r2", 1, worker, 1.0))]


def test_dead_peers_are_forgotten() -> None:
    """A dead worker gets no more requests; a dead gateway's requests neither wait nor count."""
    cluster = SmallCluster(1)
    cluster.place("r1")
    cluster.handle(PeerDown(GATEWAY), 0.0)
    assert not cluster.state.fleet.views[cluster.workers[0]].in_flight
    cluster.handle(PeerDown(cluster.workers[0]), 0.0)
    assert cluster.handle(Place("r2", 1, 4), 0.0, GATEWAY) == []
    cluster.handle(PeerDown(GATEWAY), 0.0)
    assert not cluster.state.waiting


def test_too_large_for_every_instance_is_refused_at_once() -> None:
    """A request that no known instance can ever hold does not wait."""
    cluster = SmallCluster()
    effects = cluster.handle(Place("r1", 1, 1001), 0.0, GATEWAY)
    assert effects == [Send(GATEWAY, Refused("r1", 1, RefusalReason.TOO_LARGE, 1.0))]


def test_a_repeated_place_keeps_its_turn_and_may_avoid_another() -> None:
    """A Place repeated with changes while it waits counts as it says now, and keeps its turn."""
    cluster = SmallCluster(1)
    (worker,) = cluster.workers
    assert cluster.handle(Place("r1", 2, 4, avoid=worker), 0.0, GATEWAY) == []
    assert cluster.handle(Place("r2", 2, 4, avoid=worker), 0.0, GATEWAY) == []
    assert list(cluster.state.waiting) == ["r1", "r2"]
    assert cluster.handle(Place("r1", 2, 4, avoid=worker), 1.0, GATEWAY) == []
    assert list(cluster.state.waiting) == ["r1", "r2"]
    assert cluster.handle(Place("r2", 2, 4), 1.0, GATEWAY) == [Send(GATEWAY, Placed("r2", 2, worker, 1.0))]
    assert list(cluster.state.waiting) == ["r1"]


def test_a_new_epoch_waits_anew() -> None:
    """A request that comes again under a newer epoch goes behind those that wait."""
    cluster = SmallCluster(0)
    cluster.handle(Place("r1", 1, 4), 0.0, GATEWAY)
    cluster.handle(Place("r2", 1, 4), 1.0, GATEWAY)
    cluster.handle(Place("r1", 2, 4), 5.0, GATEWAY)
    assert list(cluster.state.waiting) == ["r2", "r1"]


def test_the_deadline_is_the_earliest_and_its_tick_clears_it() -> None:
    """Every Tick at the deadline moves it forward, until nothing is in flight."""
    cluster = SmallCluster(2)
    cluster.place("r1", now=1.0)
    cluster.place("r2", now=2.0)
    cluster.place("r3", now=3.0)
    cluster.place("r1", epoch=2, now=4.0)
    deadlines = []
    while (deadline := cluster.state.next_deadline()) is not None:
        deadlines.append(deadline)
        cluster.handle(Tick(), deadline)
    assert deadlines == [7.0, 8.0, 9.0]
    assert [view.num_blocks_in_flight for view in cluster.state.fleet.views.values()] == [0, 0]


def test_reports_of_unknown_instances_are_counted() -> None:
    """A load report of an instance that is not up changes nothing."""
    cluster = SmallCluster(0)
    assert cluster.handle(report(), 0.0, Peer("worker-9", 1)) == []
    assert cluster.state.num_stale_messages == 1
    assert not cluster.state.fleet.views


def test_unplace_takes_a_placement_back_but_not_a_newer_one() -> None:
    """A request whose client has left no longer counts; an Unplace of an older epoch changes nothing."""
    cluster = SmallCluster(1)
    (view,) = cluster.state.fleet.views.values()
    cluster.place("r1", epoch=2)
    cluster.handle(Unplace("r1", 1), 0.0, GATEWAY)
    assert view.num_blocks_in_flight == 10
    cluster.handle(Unplace("r1", 2), 0.0, GATEWAY)
    assert view.num_blocks_in_flight == 0
    assert not view.in_flight
    cluster = SmallCluster(0)
    cluster.handle(Place("r1", 2, 4), 0.0, GATEWAY)
    cluster.handle(Unplace("r1", 1), 0.0, GATEWAY)
    assert list(cluster.state.waiting) == ["r1"]


def test_a_silent_instance_gets_nothing_until_it_reports_again() -> None:
    """A report counts for a while; after that its instance gets no requests, however busy the others are."""
    cluster = SmallCluster(2, report_ttl_s=1.0)
    silent, busy = cluster.workers
    cluster.handle(report(1, used=900, running=9, kv_needed_bytes=900), 0.9, busy)
    assert cluster.place("r1", now=0.9).instance == silent
    assert cluster.place("r2", now=1.0).instance == busy
    assert cluster.handle(Place("r3", 1, 200), 1.0, GATEWAY) == []  # the busy one has no room for it
    assert cluster.handle(report(1), 1.5, silent) == [Send(GATEWAY, Placed("r3", 1, silent, 0.5))]

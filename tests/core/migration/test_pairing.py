"""Migration pairing: who moves to whom, how much, until when; and the account of what is on its way."""

import pytest

from actorserve.core.messages import Peer, PeerDown, Place, Tick
from actorserve.core.migration.pairing import PairingConfig
from tests.core.harness.coordinator import placements
from tests.core.harness.fleets import GATEWAY
from tests.core.harness.pairs import A, B, C, Cluster


def test_the_lowest_goes_with_the_highest() -> None:
    """Sources are the instances under one freeness, destinations those over another; extremes are paired."""
    peers = [Peer(f"worker-{number}", 1) for number in range(6)]
    cluster = Cluster(*peers)
    for peer, needed in zip(peers, (960, 920, 890, 550, 300, 400), strict=True):
        cluster.report(peer, needed, 10)  # F is 4, 8, 11, 45, 70, 60
    assert [order[:2] for order in cluster.orders()] == [("worker-0", "worker-4"), ("worker-1", "worker-5")]


def test_half_the_gap_moves() -> None:
    """As much moves as makes both equal, and so little that the destination stays far from being a source."""
    cluster = Cluster(A, B)
    cluster.report(A, 950, 10)
    cluster.report(B, 350, 10)
    assert cluster.orders() == [("worker-0", "worker-1", 300)]
    # Here requests are small, so that many would come: (500 - x) / (10 + x / 5) = 20 for x = 60.
    cluster = Cluster(A, B)
    cluster.report(A, 900, 180)
    cluster.report(B, 500, 10)
    assert cluster.orders() == [("worker-0", "worker-1", 60)]


def test_a_source_of_few_large_requests_may_move_one() -> None:
    """Where half the gap holds no request, one of the mean size may go, if the destination stays clearly freer."""
    cluster = Cluster(A, B)
    cluster.report(A, 995, 2)
    cluster.report(B, 250, 2)
    assert cluster.orders() == [("worker-0", "worker-1", 498)]  # the gap is 745
    cluster = Cluster(A, B)
    cluster.report(A, 995, 2)
    cluster.report(B, 400, 2)
    assert cluster.orders() == [("worker-0", "worker-1", 446)]  # the gap is 595: not a whole one


def test_nobody_moves_where_nobody_is_short_or_nobody_has_room() -> None:
    """Between the bounds instances are left alone, and so is one without requests, or of another kind."""
    for a, b in ((800, 0), (950, 601), (950, 950)):
        cluster = Cluster(A, B)
        cluster.report(A, a, 10)
        cluster.report(B, b, 10)
        assert cluster.orders() == []
    cluster = Cluster(A, B, kinds={B: "other"})
    cluster.report(A, 950, 10)
    cluster.report(B, 0, 0)
    assert cluster.orders() == []
    cluster = Cluster(A, B)
    cluster.report(A, 0, 0, virtual_usage_bytes=1000)
    cluster.report(B, 0, 0)
    assert cluster.orders() == []


def test_an_order_is_given_again_only_when_it_is_over() -> None:
    """A source that is one still gets its next order when the last one is fulfilled or its time is over."""
    cluster = Cluster(A, B)
    cluster.report(A, 950, 10)
    cluster.report(B, 350, 10)
    assert cluster.orders() == [("worker-0", "worker-1", 300)]
    assert cluster.orders() == []
    cluster.report(A, 940, 10, num_migrated=1, migrated_bytes=100)
    assert cluster.orders() == []
    cluster.report(A, 930, 10, num_migrated=3, migrated_bytes=300)
    assert cluster.orders() == [("worker-0", "worker-1", 290)]
    cluster.report(A, 930, 10, num_migrated=4, migrated_bytes=310)
    assert [cluster.orders() for _ in range(4)] == [[], [], [], [("worker-0", "worker-1", 290)]]


def test_a_source_goes_on_until_it_is_none_and_then_rests() -> None:
    """Between the two bounds a source goes on; over the upper one it is stopped, and rests before it sends again."""
    cluster = Cluster(A, B)
    cluster.report(B, 350, 10)
    cluster.report(A, 950, 10)
    assert cluster.orders() == [("worker-0", "worker-1", 300)]
    cluster.report(A, 850, 10, num_migrated=1, migrated_bytes=100)
    assert cluster.orders() == []
    cluster.report(A, 750, 10, num_migrated=2, migrated_bytes=200)
    assert cluster.orders() == [("worker-0", "worker-1", 0)]
    cluster.report(A, 950, 10, num_migrated=2, migrated_bytes=200)
    assert cluster.orders(1.75) == []
    assert cluster.orders(0.25) == [("worker-0", "worker-1", 300)]


def test_who_received_does_not_send_for_a_while() -> None:
    """A destination that has become full since rests before it is a source itself, and a source before it receives."""
    cluster = Cluster(A, B)
    cluster.report(A, 950, 10)
    cluster.report(B, 350, 10)
    assert len(cluster.orders()) == 1
    cluster.report(A, 100, 2, num_migrated=8, migrated_bytes=800)
    cluster.report(B, 950, 10)
    assert cluster.orders() == [("worker-0", "worker-1", 0)]
    assert cluster.orders(2.5) == []
    assert cluster.orders(0.5) == [("worker-1", "worker-0", 425)]


def test_a_pair_of_which_nothing_comes_is_left_alone_longer_each_time() -> None:
    """Failed and idle orders have their pair rest, twice as long each time; one that succeeds forgives it all."""
    cluster = Cluster(A, B)
    cluster.report(A, 950, 10)
    cluster.report(B, 350, 10)
    assert len(cluster.orders()) == 1
    cluster.report(A, 950, 10, num_migrations_failed=1)
    assert cluster.orders() == [("worker-0", "worker-1", 0)]
    assert cluster.orders(1.75) == []
    assert len(cluster.orders(0.25)) == 1
    assert cluster.orders(1.0) == []  # nothing came of it
    assert cluster.orders(3.75) == []
    assert len(cluster.orders(0.25)) == 1
    cluster.report(A, 950, 10, num_migrations_failed=2, num_migrated=1, migrated_bytes=50)
    assert len(cluster.orders(1.0)) == 1
    cluster.report(A, 950, 10, num_migrations_failed=3, num_migrated=1, migrated_bytes=50)
    assert cluster.orders() == [("worker-0", "worker-1", 0)]
    assert len(cluster.orders(2.0)) == 1


def test_a_failed_pair_does_not_keep_others_from_it() -> None:
    """While a pair rests its source goes with the next best destination."""
    cluster = Cluster(A, B, C)
    cluster.report(A, 950, 10)
    cluster.report(B, 350, 10)
    cluster.report(C, 450, 10)
    assert cluster.orders() == [("worker-0", "worker-1", 300)]
    cluster.report(A, 950, 10, num_migrations_failed=1)
    assert cluster.orders() == [("worker-0", "worker-1", 0), ("worker-0", "worker-2", 250)]


def test_what_is_under_way_when_an_order_ends_is_waited_for() -> None:
    """A source that still copies gets no further order, as long as that may last."""
    cluster = Cluster(A, B)
    cluster.report(A, 950, 10)
    cluster.report(B, 350, 10)
    assert len(cluster.orders()) == 1
    cluster.report(A, 950, 10, num_migrating=1)
    assert cluster.orders(5.0) == []
    assert cluster.view(B).promised_bytes == 0
    cluster.report(A, 940, 10, num_migrated=1, migrated_bytes=10)
    assert len(cluster.orders()) == 1


def test_a_terminating_instance_gives_all_to_one_after_another() -> None:
    """It sends whatever its load, before all others, as much as each destination can take."""
    cluster = Cluster(A, B, C)
    cluster.report(A, 300, 3, draining=True)
    cluster.report(B, 990, 10)
    cluster.report(C, 500, 10)
    assert cluster.orders() == [("worker-0", "worker-2", 250)]  # (500 - x) / (10 + x / 100) = 20
    cluster.report(A, 50, 1, draining=True, num_migrated=2, migrated_bytes=250)
    cluster.report(B, 200, 2)
    cluster.report(C, 750, 12)
    assert cluster.orders() == [("worker-0", "worker-1", 50)]
    cluster.report(A, 0, 0, draining=True, num_migrated=3, migrated_bytes=300)
    assert cluster.orders() == []
    assert not cluster.view(B).promised_bytes


def test_only_healthy_instances_take_part() -> None:
    """Nothing goes to an instance that drains or is silent, nor from one that is silent."""
    cluster = Cluster(A, B, C, report_ttl_s=1.0)
    cluster.report(A, 950, 10)
    cluster.report(B, 0, 0, draining=True)
    cluster.report(C, 0, 0)
    cluster.now = 0.9
    cluster.report(A, 950, 10)
    assert cluster.orders(0.2) == []
    cluster.report(C, 0, 0)
    assert cluster.orders() == [("worker-0", "worker-2", 475)]
    cluster.report(C, 0, 0, draining=True)
    assert cluster.orders() == [("worker-0", "worker-2", 0)]


def test_a_dead_peer_ends_its_moves() -> None:
    """Nothing stays counted for or against the other side when a source or a destination dies."""
    for dead, other, free_bytes in ((A, B, (350, 650)), (B, A, (50, 50))):
        cluster = Cluster(A, B)
        cluster.report(A, 950, 10)
        cluster.report(B, 350, 10)
        assert len(cluster.orders()) == 1
        assert cluster.view(other).free_bytes() == free_bytes[0]
        cluster.handle(PeerDown(dead), cluster.now)
        assert cluster.view(other).free_bytes() == free_bytes[1]
        assert cluster.state.next_deadline() is None


def test_a_destination_that_fills_up_otherwise_gets_no_more() -> None:
    """When a destination has itself got under the lower bound meanwhile, the order ends."""
    cluster = Cluster(A, B)
    cluster.report(A, 950, 10)
    cluster.report(B, 350, 10)
    assert len(cluster.orders()) == 1
    cluster.report(B, 950, 10)
    assert cluster.orders() == [("worker-0", "worker-1", 0)]


def test_a_source_draws_no_requests_by_what_is_to_leave() -> None:
    """Until it has gone, what an order moves counts where it is: a source of few requests is not the freest by it."""
    cluster = Cluster(A, B, late_binding=False)
    cluster.report(A, 990, 1, num_waiting=1, virtual_usage_bytes=1090)
    cluster.report(B, 250, 8)
    assert cluster.orders() == [("worker-0", "worker-1", 495)]
    effects = cluster.handle(Place("r", 1, 10), cluster.now, GATEWAY)
    assert placements(effects) == [("r", "worker-1")]


def test_moves_are_few_at_once() -> None:
    """No more pairs move at once than the bound, those with the lowest sources first."""
    peers = [Peer(f"worker-{number}", 1) for number in range(8)]
    cluster = Cluster(*peers, migration=PairingConfig(10.0, 20.0, 40.0, max_moves=2))
    for number, peer in enumerate(peers):
        cluster.report(peer, 950 - number if number < 4 else 100, 10)
    assert [order[0] for order in cluster.orders()] == ["worker-0", "worker-1"]
    assert cluster.orders() == []


def test_a_big_waiting_request_has_small_ones_moved_away() -> None:
    """De-fragmentation: the head of the line counts with its demand, so its instance sends though it is not full."""
    cluster = Cluster(A, B)
    cluster.report(A, 600, 6, num_waiting=1, virtual_usage_bytes=600 + 500, kv_wanted_bytes=500)
    cluster.report(B, 500, 5)
    assert cluster.orders() == [("worker-0", "worker-1", 300)]


def test_an_instance_that_is_kept_for_a_big_request_makes_room_for_it() -> None:
    """A request that waits for its promotion in vain has small ones moved away, though all free memory is in pieces."""
    cluster = Cluster(A, B, C, promote_after_s=0.5)
    cluster.report(A, 500, 5)
    cluster.report(B, 550, 5)
    cluster.report(C, 600, 5)
    cluster.handle(Place("big", 1, 600), cluster.now, GATEWAY)
    assert cluster.orders() == []
    # It fits nowhere: A is kept for it, as if it stood at the head of the line there: (500 + 600 - 550) / 2 more.
    assert cluster.orders() == [("worker-0", "worker-1", 275)]
    assert cluster.view(B).room_tokens(64) == 175
    assert placements(cluster.report(A, 450, 4, num_migrated=1, migrated_bytes=100)) == []
    assert cluster.view(A).reserved_for is not None
    assert placements(cluster.report(A, 300, 3, num_migrated=2, migrated_bytes=200)) == [("big", "worker-0")]
    assert cluster.view(A).reserved_for is None


def test_nothing_goes_to_an_instance_that_is_kept() -> None:
    """Where room is kept for a waiting request none is sent by migration, though there is more than that wants."""
    cluster = Cluster(A, B, promote_after_s=0.5, max_queue_per_instance=4)
    cluster.report(A, 950, 10)
    cluster.report(B, 900, 5)
    cluster.handle(Place("big", 1, 600), cluster.now, GATEWAY)
    assert cluster.orders(0.5) == []
    assert cluster.report(B, 0, 0, num_waiting=4) == []  # room enough, and too many wait
    assert cluster.view(B).reserved_for is not None
    assert cluster.orders() == []


def test_a_coordinator_that_begins_anew_takes_counts_as_they_are() -> None:
    """What workers migrated before a restart neither fulfils the first order nor has it fail."""
    cluster = Cluster(A, B)
    cluster.report(A, 950, 10, num_migrated=7, migrated_bytes=5000, num_migrations_failed=3)
    cluster.report(B, 350, 10)
    assert cluster.orders() == [("worker-0", "worker-1", 300)]
    cluster.report(A, 950, 10, num_migrated=7, migrated_bytes=5000, num_migrations_failed=3)
    assert cluster.orders() == []
    assert cluster.view(B).promised_bytes == 300


def test_rounds_come_only_where_there_is_a_choice() -> None:
    """Without migration, or with one instance, nothing is ever due; a Tick moves the deadline by a round."""
    assert Cluster(A, B, migration=None).state.next_deadline() is None
    assert Cluster(A).state.next_deadline() is None
    state = Cluster(A, B).state
    assert state.next_deadline() == 0.25
    state.handle(Tick(), 0.25)
    assert state.next_deadline() == 0.5
    state.handle(PeerDown(A), 0.3)
    assert state.next_deadline() is None


def test_bounds_must_rise() -> None:
    """Bounds by which an instance would send and receive in turn are refused."""
    for bounds in ((10.0, 5.0, 20.0), (10.0, 20.0, 15.0)):
        with pytest.raises(ValueError, match="must rise"):
            PairingConfig(*bounds)

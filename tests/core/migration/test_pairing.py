"""Migration pairing: which instance moves to which, how much, until when; and the account of incoming bytes."""

import pytest

from actorserve.core.messages import Peer, PeerDown, Place, Tick
from actorserve.core.migration.pairing import PairingConfig
from tests.core.harness.coordinator import placements
from tests.core.harness.fleets import GATEWAY
from tests.core.harness.pairs import A, B, C, Cluster


def test_the_lowest_is_paired_with_the_highest() -> None:
    """Sources are instances under one freeness, destinations instances over another; the extremes are paired."""
    peers = [Peer(f"worker-{number}", 1) for number in range(6)]
    cluster = Cluster(*peers)
    for peer, needed in zip(peers, (960, 920, 890, 550, 300, 400), strict=True):
        cluster.report(peer, needed, 10)  # F is 4, 8, 11, 45, 70, 60
    assert [order[:2] for order in cluster.orders()] == [("worker-0", "worker-4"), ("worker-1", "worker-5")]


def test_half_the_gap_moves() -> None:
    """As much moves as makes both equal, but so little that the destination stays far from being a source."""
    cluster = Cluster(A, B)
    cluster.report(A, 950, 10)
    cluster.report(B, 350, 10)
    assert cluster.orders() == [("worker-0", "worker-1", 300)]
    # Here requests are small, so many would come: (500 - x) / (10 + x / 5) = 20 for x = 60.
    cluster = Cluster(A, B)
    cluster.report(A, 900, 180)
    cluster.report(B, 500, 10)
    assert cluster.orders() == [("worker-0", "worker-1", 60)]


def test_a_source_of_few_large_requests_may_move_one() -> None:
    """If half the gap is less than a request of the mean size, one may still move if the destination stays clearly
    freer.
    """
    cluster = Cluster(A, B)
    cluster.report(A, 995, 2)
    cluster.report(B, 250, 2)
    assert cluster.orders() == [("worker-0", "worker-1", 498)]  # the gap is 745
    cluster = Cluster(A, B)
    cluster.report(A, 995, 2)
    cluster.report(B, 400, 2)
    assert cluster.orders() == [("worker-0", "worker-1", 446)]  # the gap is 595, so not a whole request


def test_nothing_moves_if_no_instance_is_short_or_none_has_room() -> None:
    """Instances between the bounds are left alone, and so are instances without requests, or of another kind."""
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


def test_the_next_move_begins_only_when_the_last_is_over() -> None:
    """An instance that is still a source gets its next move when the last one is done or its time is over."""
    cluster = Cluster(A, B)
    cluster.report(A, 950, 10)
    cluster.report(B, 350, 10)
    assert cluster.orders() == [("worker-0", "worker-1", 300)]
    assert cluster.orders() == []
    cluster.report(A, 940, 10, num_migrating=1, num_migrated=1, migrated_bytes=100)
    assert cluster.orders() == []
    cluster.report(A, 930, 10, num_migrated=3, migrated_bytes=300)
    assert cluster.orders() == [("worker-0", "worker-1", 290)]
    cluster.report(A, 930, 10, num_migrating=1, num_migrated=4, migrated_bytes=310)
    assert [cluster.orders() for _ in range(4)] == [[], [], [], []]
    cluster.report(A, 930, 10, num_migrated=4, migrated_bytes=310)
    assert cluster.orders() == [("worker-0", "worker-1", 290)]


def test_a_move_that_finds_no_more_requests_is_over_at_half_time() -> None:
    """A source whose requests are all too large for what is left of its move gets another destination sooner."""
    cluster = Cluster(A, B, C)
    cluster.report(A, 950, 10)
    cluster.report(B, 350, 10)
    cluster.report(C, 450, 10)
    assert cluster.orders() == [("worker-0", "worker-1", 300)]
    cluster.report(A, 940, 10, num_migrated=1, migrated_bytes=100)
    cluster.report(B, 450, 11)
    assert cluster.orders() == []
    assert cluster.orders() == [("worker-0", "worker-1", 0), ("worker-0", "worker-2", 245)]


def test_a_source_goes_on_until_it_is_free_enough_and_then_rests() -> None:
    """Between the two bounds a source goes on; over the upper bound it stops, and rests before it sends again."""
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


def test_a_destination_does_not_send_for_a_while() -> None:
    """A destination that has become full rests before it is a source itself, and a source before it receives."""
    cluster = Cluster(A, B)
    cluster.report(A, 950, 10)
    cluster.report(B, 350, 10)
    assert len(cluster.orders()) == 1
    cluster.report(A, 100, 2, num_migrated=8, migrated_bytes=800)
    cluster.report(B, 950, 10)
    assert cluster.orders() == [("worker-0", "worker-1", 0)]
    assert cluster.orders(2.5) == []
    assert cluster.orders(0.5) == [("worker-1", "worker-0", 425)]


def test_a_pair_that_moves_nothing_is_left_alone_longer_each_time() -> None:
    """After a failed or idle move its pair rests, twice as long each time; a move that succeeds ends that."""
    cluster = Cluster(A, B)
    cluster.report(A, 950, 10)
    cluster.report(B, 350, 10)
    assert len(cluster.orders()) == 1
    cluster.report(A, 950, 10, num_migrations_failed=1)
    assert cluster.orders() == [("worker-0", "worker-1", 0)]
    assert cluster.orders(1.75) == []
    assert len(cluster.orders(0.25)) == 1
    assert cluster.orders(1.0) == []  # it has moved nothing
    assert cluster.orders(3.75) == []
    assert len(cluster.orders(0.25)) == 1
    cluster.report(A, 950, 10, num_migrations_failed=2, num_migrated=1, migrated_bytes=50)
    assert len(cluster.orders(1.0)) == 1
    cluster.report(A, 950, 10, num_migrations_failed=3, num_migrated=1, migrated_bytes=50)
    assert cluster.orders() == [("worker-0", "worker-1", 0)]
    assert len(cluster.orders(2.0)) == 1


def test_a_source_whose_pair_rests_takes_another_destination() -> None:
    """While a pair rests, its source is paired with the next best destination."""
    cluster = Cluster(A, B, C)
    cluster.report(A, 950, 10)
    cluster.report(B, 350, 10)
    cluster.report(C, 450, 10)
    assert cluster.orders() == [("worker-0", "worker-1", 300)]
    cluster.report(A, 950, 10, num_migrations_failed=1)
    assert cluster.orders() == [("worker-0", "worker-1", 0), ("worker-0", "worker-2", 250)]


def test_migrations_in_flight_when_a_move_ends_are_waited_for() -> None:
    """A source that still copies gets no further move, as long as a copy may last."""
    cluster = Cluster(A, B)
    cluster.report(A, 950, 10)
    cluster.report(B, 350, 10)
    assert len(cluster.orders()) == 1
    cluster.report(A, 950, 10, num_migrating=1)
    assert cluster.orders(5.0) == []
    assert cluster.view(B).promised_bytes == 0
    cluster.report(A, 940, 10, num_migrated=1, migrated_bytes=10)
    assert len(cluster.orders()) == 1


def test_a_terminating_instance_moves_everything_to_one_after_another() -> None:
    """A terminating instance is a source before all others, whatever its load, for what its destination can take."""
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
    """Nothing moves to an instance that drains or is silent, nor from one that is silent."""
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


def test_a_death_ends_its_moves() -> None:
    """When a source or a destination dies, its move no longer counts at the other instance."""
    for dead, alive, free_bytes in ((A, B, (350, 650)), (B, A, (50, 50))):
        cluster = Cluster(A, B)
        cluster.report(A, 950, 10)
        cluster.report(B, 350, 10)
        assert len(cluster.orders()) == 1
        assert cluster.view(alive).free_bytes() == free_bytes[0]
        cluster.handle(PeerDown(dead), cluster.now)
        assert cluster.view(alive).free_bytes() == free_bytes[1]
        assert cluster.state.next_deadline() is None


def test_a_destination_that_fills_up_gets_no_more() -> None:
    """When a destination has itself fallen under the lower bound, the move ends."""
    cluster = Cluster(A, B)
    cluster.report(A, 950, 10)
    cluster.report(B, 350, 10)
    assert len(cluster.orders()) == 1
    cluster.report(B, 950, 10)
    assert cluster.orders() == [("worker-0", "worker-1", 0)]


def test_outgoing_bytes_attract_no_requests() -> None:
    """Outgoing bytes count at the source until they have left, so a source of few requests is not the freest."""
    cluster = Cluster(A, B, late_binding=False)
    cluster.report(A, 990, 1, num_waiting=1, virtual_usage_bytes=1090)
    cluster.report(B, 250, 8)
    assert cluster.orders() == [("worker-0", "worker-1", 495)]
    effects = cluster.handle(Place("r", 1, 10), cluster.now, GATEWAY)
    assert placements(effects) == [("r", "worker-1")]


def test_moves_at_once_are_bounded() -> None:
    """No more pairs move at once than the bound, the lowest sources first."""
    peers = [Peer(f"worker-{number}", 1) for number in range(8)]
    cluster = Cluster(*peers, migration=PairingConfig(10.0, 20.0, 40.0, max_moves=2))
    for number, peer in enumerate(peers):
        cluster.report(peer, 950 - number if number < 4 else 100, 10)
    assert [order[0] for order in cluster.orders()] == ["worker-0", "worker-1"]
    assert cluster.orders() == []


def test_a_big_waiting_request_has_small_ones_moved_away() -> None:
    """De-fragmentation: the head of the line counts with its demand, so its instance is a source before it is full."""
    cluster = Cluster(A, B)
    cluster.report(A, 600, 6, num_waiting=1, virtual_usage_bytes=600 + 500, kv_wanted_bytes=500)
    cluster.report(B, 500, 5)
    assert cluster.orders() == [("worker-0", "worker-1", 300)]


def test_an_instance_that_is_reserved_for_a_big_request_makes_room_for_it() -> None:
    """Small requests move away from an instance that is reserved for an overdue request, until that request fits."""
    cluster = Cluster(A, B, C, promote_after_s=0.5)
    cluster.report(A, 500, 5)
    cluster.report(B, 550, 5)
    cluster.report(C, 600, 5)
    cluster.handle(Place("big", 1, 600), cluster.now, GATEWAY)
    assert cluster.orders() == []
    # The request fits nowhere. A is reserved for it, as if the request were the head of the line there: (500 + 600 -
    # 550) / 2 more.
    assert cluster.orders() == [("worker-0", "worker-1", 275)]
    assert cluster.view(B).room_tokens(64) == 175
    assert placements(cluster.report(A, 450, 4, num_migrated=1, migrated_bytes=100)) == []
    assert cluster.view(A).reserved_for is not None
    assert placements(cluster.report(A, 300, 3, num_migrated=2, migrated_bytes=200)) == [("big", "worker-0")]
    assert cluster.view(A).reserved_for is None


def test_a_reserved_instance_makes_room_at_once() -> None:
    """A reserved instance that received requests a moment ago receives no more, and gives some away without a rest."""
    cluster = Cluster(A, B, C, promote_after_s=0.5)
    cluster.report(A, 950, 10)
    cluster.report(B, 500, 5)
    cluster.report(C, 700, 5)
    assert cluster.orders() == [("worker-0", "worker-1", 225)]
    cluster.handle(Place("big", 1, 700), cluster.now, GATEWAY)
    cluster.report(A, 900, 9, num_migrating=1, num_migrated=1, migrated_bytes=100)
    cluster.report(B, 490, 5)
    assert cluster.orders() == []
    assert cluster.orders() == [("worker-0", "worker-1", 0), ("worker-1", "worker-2", 166)]
    assert cluster.view(B).reserved_for is not None


def test_nothing_moves_to_a_reserved_instance() -> None:
    """Nothing moves to an instance that is reserved for a waiting request, even if it has more room than needed."""
    cluster = Cluster(A, B, promote_after_s=0.5, max_queue_per_instance=4)
    cluster.report(A, 950, 10)
    cluster.report(B, 900, 5)
    cluster.handle(Place("big", 1, 600), cluster.now, GATEWAY)
    assert cluster.orders(0.5) == []
    assert cluster.report(B, 0, 0, num_waiting=4) == []  # it has room, but its queue is full
    assert cluster.view(B).reserved_for is not None
    assert cluster.orders() == []


def test_a_restarted_coordinator_takes_counts_as_they_are() -> None:
    """What workers migrated before a restart counts neither for nor against the first move."""
    cluster = Cluster(A, B)
    cluster.report(A, 950, 10, num_migrated=7, migrated_bytes=5000, num_migrations_failed=3)
    cluster.report(B, 350, 10)
    assert cluster.orders() == [("worker-0", "worker-1", 300)]
    cluster.report(A, 950, 10, num_migrated=7, migrated_bytes=5000, num_migrations_failed=3)
    assert cluster.orders() == []
    assert cluster.view(B).promised_bytes == 300


def test_rounds_come_only_if_there_is_a_choice() -> None:
    """Without migration, or with one instance, no round is due; a Tick moves the deadline by a round."""
    assert Cluster(A, B, migration=None).state.next_deadline() is None
    assert Cluster(A).state.next_deadline() is None
    state = Cluster(A, B).state
    assert state.next_deadline() == 0.25
    state.handle(Tick(), 0.25)
    assert state.next_deadline() == 0.5
    state.handle(PeerDown(A), 0.3)
    assert state.next_deadline() is None


def test_bounds_must_rise() -> None:
    """Bounds are refused if an instance could send and receive in turn."""
    for bounds in ((10.0, 5.0, 20.0), (10.0, 20.0, 15.0)):
        with pytest.raises(ValueError, match="must rise"):
            PairingConfig(*bounds)

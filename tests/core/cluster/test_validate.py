"""The coordinator's invariants: validate() notices when one of them is broken."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.cluster.state import ClusterState
from actorserve.core.messages import Place, Tick
from actorserve.core.migration.pairing import PairingConfig
from tests.core.harness.coordinator import A, B, Coordinator
from tests.core.harness.fleets import GATEWAY

FAR = 1e6  # seconds after all times of the scenario


def busy_state() -> ClusterState:
    """One placement in flight, three waiting requests, a reservation and a move."""
    coordinator = Coordinator(
        A,
        B,
        promote_after_s=1.0,
        min_share=0.1,
        migration=PairingConfig(10.0, 20.0, 40.0),
        scaling=ScalingConfig(max_workers=4),
    )
    coordinator.report(A, 5)
    coordinator.report(B, 700)
    coordinator.place("placed", 100)
    coordinator.place("long", 900, now=0.0)
    coordinator.place("low", 950, now=0.0, priority=3)
    coordinator.handle(Tick(), 0.25)
    coordinator.place("short", 50, now=1.0)
    state = coordinator.state
    assert coordinator.reserved == {"worker-1": "long"}
    assert state.pairing is not None
    assert list(state.pairing.moves) == [A]
    assert list(state.fleet.views[B].in_flight) == ["placed"]
    assert list(state.waiting) == ["long", "low", "short"]
    return state


def count_a_block_twice(state: ClusterState) -> None:
    state.fleet.views[B].num_blocks_in_flight += 1


def lose_a_placement(state: ClusterState) -> None:
    state.fleet.views[B].drop_placement("placed")


def place_what_waits(state: ClusterState) -> None:
    state.fleet.place(state.fleet.views[A], GATEWAY, Place("low", 1, 10), FAR)


def free_a_reserved_instance(state: ClusterState) -> None:
    state.fleet.views[B].reserved_for = None


def reserve_two_instances(state: ClusterState) -> None:
    state.fleet.views[A].reserved_for = state.fleet.views[B].reserved_for


def reserve_for_what_does_not_wait(state: ClusterState) -> None:
    state.queue.remove("long", FAR)


def change_a_report_only(state: ClusterState) -> None:
    view = state.fleet.views[A]
    view.report = replace(view.report, kv_needed_bytes=0, virtual_usage_bytes=0)


def change_a_score_only(state: ClusterState) -> None:
    state.fleet.views[A].score += 1.0


def promise_more_than_moves(state: ClusterState) -> None:
    state.fleet.promise(state.fleet.views[B], 10)


def lose_a_move(state: ClusterState) -> None:
    assert state.pairing is not None
    state.pairing.moves.clear()


def lose_an_instance_of_a_move(state: ClusterState) -> None:
    state.fleet.remove(A)


def grow_the_largest(state: ClusterState) -> None:
    state.fleet.largest_tokens = 2000


def count_waiting_tokens_twice(state: ClusterState) -> None:
    state.queue.num_tokens *= 2


def wait_in_no_class(state: ClusterState) -> None:
    state.queue.waiting["new"] = state.queue.waiting["low"]


def fail_without_counting(state: ClusterState) -> None:
    assert state.scaling is not None
    state.scaling._has_failed = True


@pytest.mark.parametrize(
    ("break_it", "text"),
    [
        (count_a_block_twice, "blocks in flight are those of the placements"),
        (lose_a_placement, "every placement in flight counts at one known instance"),
        (place_what_waits, "low waits, so it is not placed as well"),
        (free_a_reserved_instance, "every reservation is of one known instance"),
        (reserve_two_instances, "worker-0 is what long reserved"),
        (reserve_for_what_does_not_wait, "reserved for long, so it waits"),
        (change_a_report_only, "is up to date"),
        (change_a_score_only, "the list by score agrees"),
        (promise_more_than_moves, "is promised what its move has left"),
        (lose_a_move, "is promised what its move has left"),
        (lose_an_instance_of_a_move, "the source worker-0 is known"),
        (grow_the_largest, "largest_tokens is that of the largest instance"),
        (count_waiting_tokens_twice, "num_tokens is the sum"),
        (wait_in_no_class, "are keyed by id"),
        (fail_without_counting, "a failed start is counted"),
    ],
)
def test_a_broken_invariant_is_noticed(break_it: Callable[[ClusterState], None], text: str) -> None:
    """A state that holds everything passes; each broken invariant fails with a text that names it."""
    state = busy_state()
    state.validate()
    break_it(state)
    with pytest.raises(AssertionError, match=text):
        state.validate()

"""The fleet: its count of bytes on their way to instances, and its index over any number of instances."""

from hypothesis import given, settings, strategies as st

from actorserve.core.messages import InstanceRole, LoadReport, ModelInfo, Peer, Place
from actorserve.core.placement.fleet import Fleet
from actorserve.core.placement.instance_view import NewInstance
from tests.core.harness.fleets import GATEWAY, choose, fleet_of, report, view
from tests.core.harness.late_binding import MAX_QUEUE, chosen_by_definition


def test_what_migrations_bring_counts_until_reports_show_it() -> None:
    """A move's bytes count at the destination, less what it has reserved, in its freeness and its room."""
    fleet = fleet_of([view("b", used=100, running=3), view("a", used=350, running=3)])
    destination = fleet.views[Peer("b", 1)]
    fleet.promise(destination, 300)
    assert destination.free_bytes() == 600
    assert destination.room_tokens(64) == 280
    assert choose(fleet, Place("r", 1, 4)) == "a"
    fleet.on_report(destination.peer, report(1, used=300, running=3, kv_reserved_bytes=200), 0.0)
    assert destination.free_bytes() == 1000 - 300 - 100
    fleet.promise(destination, -300)
    assert destination.free_bytes() == 700
    assert choose(fleet, Place("r", 1, 4)) == "b"
    fleet.validate()


def test_a_handoff_counts_once_from_its_placement_to_its_start() -> None:
    """The destination reserves the memory with the first copy, and reports it. The fleet has counted it until then."""
    fleet = fleet_of([view("p"), view("d", used=100, running=3, kv_needed_bytes=100)])
    prompt, destination = fleet.views[Peer("p", 1)], fleet.views[Peer("d", 1)]
    fleet.place(prompt, GATEWAY, Place("r", 1, 80), 0.0, token_view=destination)
    assert (destination.free_bytes(), destination.room_tokens(64)) == (700, 280)
    held = {"used": 300, "kv_needed_bytes": 300}
    fleet.on_report(destination.peer, report(1, running=3, kv_reserved_bytes=200, **held), 0.0)
    assert (destination.free_bytes(), destination.room_tokens(64)) == (700, 280)
    fleet.on_report(destination.peer, report(2, running=4, accepted=("r",), **held), 0.0)
    assert (destination.free_bytes(), destination.room_tokens(64)) == (700, 280)
    fleet.validate()


def test_memory_reserved_for_a_handoff_hides_no_migration() -> None:
    """A move of 100 bytes to a token instance is still to come, though it has reserved 200 bytes for a handoff."""
    fleet = fleet_of([view("p"), view("t")])
    prompt, token = fleet.views[Peer("p", 1)], fleet.views[Peer("t", 1)]
    fleet.set_role(token, InstanceRole.TOKEN)
    fleet.place(prompt, GATEWAY, Place("r", 1, 80), 0.0, token_view=token)
    fleet.promise(token, 100)
    fleet.on_report(token.peer, report(1, used=200, kv_needed_bytes=200, kv_reserved_bytes=200), 0.0)
    assert (token.free_bytes(), token.room_tokens(64)) == (700, 280)
    fleet.on_report(token.peer, report(2, used=300, kv_needed_bytes=300, kv_reserved_bytes=300), 0.0)
    assert (token.free_bytes(), token.room_tokens(64)) == (700, 280)
    fleet.validate()


LOADS = st.tuples(
    st.integers(0, 11),
    st.sampled_from([0, 0, 0, 100, 300, 500]),  # room
    st.integers(0, 1000),  # virtual usage
    st.integers(1, 3),  # running
)


@settings(max_examples=100, deadline=None)
@given(st.lists(LOADS, min_size=12, max_size=30), st.lists(st.integers(1, 600), min_size=1, max_size=10))
def test_the_freest_instance_that_admits_is_found_however_many_have_room(
    loads: list[tuple[int, int, int, int]], sizes: list[int]
) -> None:
    """Of a dozen instances the choice is the plain definition's, after any reports and placements."""
    fleet = Fleet(MAX_QUEUE, 5.0)
    for number in range(12):
        fleet.add(NewInstance(Peer(f"worker-{number}", 1), "k", ModelInfo("m", 100, 1000)))
    for sequence, (number, room, usage, num_running) in enumerate(loads):
        load = LoadReport(sequence, num_running, 0, 1000, 0, usage, 10, 10, 0, kv_needed_bytes=1000 - room)
        fleet.on_report(Peer(f"worker-{number}", 1), load, 0.0)
    for number, num_tokens in enumerate(sizes):
        place = Place(f"r{number}", 1, num_tokens, prefix_names=("1" * 16, "2" * 16)[: number % 3])
        chosen = fleet.choose(place)
        assert chosen is chosen_by_definition(fleet, place)
        if chosen is not None:
            fleet.place(chosen, GATEWAY, place, 0.0)
        fleet.validate()

"""Dispatch by pending tokens: join the shortest queue."""

from actorserve.core.messages import Peer, Place
from tests.core.harness.fleets import GATEWAY, choose, fleet_of, report, view

X = "1" * 16  # name of a prefix


def test_the_shortest_queue_gets_the_request() -> None:
    """The fewest pending prompt tokens win, however full the memory is and however many requests decode."""
    views = [view("a"), view("b")]
    views[0].report = report(used=800, running=20, pending_prompt_tokens=30)
    views[1].report = report(used=100, running=1, pending_prompt_tokens=60)
    assert choose(fleet_of(views, "shortest_queue"), Place("r", 1, 4)) == "a"


def test_among_idle_queues_the_fewest_requests_win() -> None:
    """A request counts one token, which its next iteration feeds, so that requests that decode are spread, too."""
    views = [view("a", running=2), view("b", running=3)]
    assert choose(fleet_of(views, "shortest_queue"), Place("r", 1, 4)) == "a"


def test_placements_in_flight_lengthen_a_queue_until_a_report_shows_them() -> None:
    """A burst is spread over the instances, although no report has come in between."""
    fleet = fleet_of([view("a"), view("b")], "shortest_queue")
    chosen = []
    for number, num_tokens in enumerate((50, 20, 20, 20)):
        place = Place(f"r{number}", 1, num_tokens)
        found = fleet.choose(place)
        assert found is not None
        fleet.place(found, GATEWAY, place, 0.0)
        fleet.validate()
        chosen.append(found.peer.name)
    assert chosen == ["b", "a", "a", "a"]  # 50 tokens and a request on b; 20, 40 and 60 tokens on a
    fleet.on_report(Peer("a", 1), report(1, running=3, accepted=("r1", "r2", "r3"), pending_prompt_tokens=40), 0.1)
    fleet.validate()
    assert choose(fleet, Place("r4", 1, 4)) == "a"


def test_a_cached_prefix_counts_as_computed() -> None:
    """A longer queue is the better one if the instance holds so much of the prompt that less remains in all."""
    views = [view("a"), view("b")]
    views[0].report = report(pending_prompt_tokens=50)
    fleet = fleet_of(views, "shortest_queue")
    place = Place("r", 1, 100, prefix_names=(X,))
    assert choose(fleet, place) == "b"
    fleet.prefixes.learn(Peer("a", 1), (X,), 1000)
    assert choose(fleet, place) == "a"

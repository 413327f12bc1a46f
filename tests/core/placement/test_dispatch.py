"""Dispatch: a request goes to the highest freeness among the instances that admit it."""

from dataclasses import replace

from actorserve.core.messages import ModelInfo, Peer, Place
from actorserve.core.placement.instance_view import NewInstance
from tests.core.harness.fleets import GATEWAY, MODEL, choose, choose_of, fleet_of, report, view

X, Y = "1" * 16, "2" * 16  # names of prefixes


def test_dispatch_goes_to_the_freest() -> None:
    """The highest freeness wins."""
    assert choose_of([view("a", used=500, running=2), view("b", used=500, running=4)], Place("r", 1, 4)) == "a"


def test_dispatch_goes_where_the_request_fits() -> None:
    """A busy instance that can hold the request goes before a free one that never can."""
    free, busy = view("free"), view("busy", used=900, running=9)
    free.model = ModelInfo("m", 100, 50)
    assert choose_of([free, busy], Place("r", 1, 51)) == "busy"
    assert choose_of([free, busy], Place("r", 1, 50)) == "free"


def test_dispatch_goes_where_memory_is_not_short() -> None:
    """An instance whose usable memory cannot hold the request never gets it, however idle."""
    short, busy = view("short"), view("busy", kind="y", used=990, running=9)
    short.report = replace(report(), kv_total_bytes=500, host_total_bytes=1000)
    assert choose_of([short, busy], Place("r", 1, 201)) == "busy"
    assert choose_of([short, busy], Place("r", 2, 201, kind="k")) == "busy"
    assert choose_of([short, busy], Place("r", 1, 200)) == "short"
    assert choose_of([short], Place("r", 1, 201)) is None


def test_dispatch_goes_where_started_requests_leave_room() -> None:
    """The request must fit in addition to the KV of all started requests, in device and host memory together."""
    full = view("full")
    full.report = report(used=1000, kv_needed_bytes=1200, host_total_bytes=500)
    assert choose_of([full], Place("r", 1, 121)) is None
    assert choose_of([full], Place("r", 1, 120)) == "full"
    full.report = report(used=1000, kv_needed_bytes=1600, host_total_bytes=500)
    assert choose_of([full], Place("r", 1, 1)) is None


def test_dispatch_goes_where_few_wait() -> None:
    """An instance whose queue has reached its bound gets nothing, however much memory is free."""
    long, busy = view("long"), view("busy", used=950, running=9)
    long.report = replace(report(), num_waiting=64)
    assert choose_of([long, busy], Place("r", 1, 4)) == "busy"
    long.report = replace(report(), num_waiting=63)
    assert choose_of([long, busy], Place("r", 1, 4)) == "long"


def test_dispatch_goes_where_waiting_requests_leave_room() -> None:
    """The request must fit in addition to the demand of all requests that wait there, and not of the first alone."""
    full = view("full")
    full.report = report(waiting=3, used=400, kv_needed_bytes=400, kv_head_bytes=100, kv_wanted_bytes=500)
    assert choose_of([full], Place("r", 1, 41)) is None
    assert choose_of([full], Place("r", 1, 40)) == "full"


def test_dispatch_counts_all_waiting_requests_like_placements_in_flight() -> None:
    """A waiting request counts by its demand and as a running request, whatever its turn. The head of the line, which
    virtual usage includes, counts once.
    """
    few, many = view("few"), view("many")
    few.report = report(used=500, running=2, waiting=1, kv_head_bytes=100, kv_wanted_bytes=100)
    many.report = report(used=500, running=2, waiting=2, kv_head_bytes=100, kv_wanted_bytes=200)
    assert few.dispatch_freeness() == (1000 - 500) / 3
    assert many.dispatch_freeness() == (1000 - 500 - 100) / 4
    assert choose_of([few, many], Place("r", 1, 4)) == "few"


def test_dispatch_goes_where_few_tokens_must_be_fed() -> None:
    """A prompt counts by every token that is left of it, because a new one waits for it. So a busy instance without
    prompts is freer than one whose single request has a long prompt, although that one has more memory.
    """
    busy, prefilling = view("busy", used=500, running=20), view("prefilling")
    prefilling.report = report(used=100, running=1, pending_prompt_tokens=400)
    assert prefilling.dispatch_freeness() == 900 / 401
    assert choose_of([busy, prefilling], Place("r", 1, 4)) == "busy"
    prefilling.report = report(used=100, running=1, pending_prompt_tokens=30)
    assert choose_of([busy, prefilling], Place("r", 1, 4)) == "prefilling"


def test_a_saved_prefix_makes_up_for_a_queue_as_long() -> None:
    """The instance that holds a prefix gets the request although a prompt waits there, if the prefix is longer."""
    for pending, expected in ((100, "a"), (400, "b")):
        fleet = fleet_of([view("a", running=1, pending_prompt_tokens=pending), view("b", running=1, used=200)])
        fleet.prefixes.learn(Peer("a", 1), (X, Y), 1000)  # 128 tokens
        assert choose(fleet, Place("r", 1, 200, prefix_names=(X, Y))) == expected


def test_where_memory_lacks_dispatch_goes_to_the_smallest_lack() -> None:
    """A lack of memory is not divided among the requests, so the instance with more requests looks no better."""
    fleet = fleet_of([view("less", used=1100, running=1), view("more", used=1900, running=100)], max_queue=None)
    assert choose(fleet, Place("r", 1, 4)) == "less"


def test_a_request_waits_for_its_kind() -> None:
    """While an instance of its kind could hold it, a request that moves waits for that instance."""
    full, free = view("full", kind="x"), view("free", kind="y")
    full.report = report(kv_needed_bytes=1000)
    assert choose_of([full, free], Place("r", 2, 4, kind="x")) is None
    assert choose_of([full, free], Place("r", 2, 4)) == "free"
    full.report = report(kv_needed_bytes=1000, draining=True)
    assert choose_of([full, free], Place("r", 2, 4, kind="x")) == "free"


def test_dispatch_prefers_the_kind_that_made_the_tokens() -> None:
    """A request that moves stays within its kind as long as that has an instance, even if it is a busier one."""
    busy, free = view("busy", kind="x", used=900, running=9), view("free", kind="y")
    place = Place("r", 2, 4, kind="x")
    assert choose_of([busy, free], place) == "busy"
    assert choose_of([free], place) == "free"


def test_dispatch_avoids_the_instance_that_failed_the_draining_and_the_silent() -> None:
    """A request never goes to the instance that just failed it, nor to one that terminates or has not reported."""
    failed, draining = view("failed"), view("draining")
    silent = NewInstance(Peer("silent", 1), "k", MODEL)
    draining.report = report(draining=True)
    assert choose_of([failed, silent, draining], Place("r", 2, 4, avoid=failed.peer)) is None


def test_ties_end_on_the_name() -> None:
    """Of equally free instances the one with the greatest name is chosen, in whatever order they came up."""
    views = [view("b"), view("c"), view("a")]
    for order in (views, views[::-1]):
        assert choose_of(order, Place("r", 1, 4)) == "c"


def test_the_instance_with_the_prefix_is_freer_by_what_it_saves() -> None:
    """An instance that holds a prefix of the prompt is chosen as long as that outweighs its load, and no longer."""
    names = (X, Y)  # stand for 64 and 128 tokens
    for running, expected in ((4, "a"), (5, "b")):
        fleet = fleet_of([view("a", running=running), view("b", running=3, used=100)])
        fleet.prefixes.learn(Peer("a", 1), names, 1000)
        holder, free = fleet.views[Peer("a", 1)], fleet.views[Peer("b", 1)]
        assert holder.dispatch_freeness() < free.dispatch_freeness() == 300
        assert holder.dispatch_freeness(128) == (1000 + 320) / running
        assert choose(fleet, Place("r", 1, 200, prefix_names=names)) == expected
        assert choose(fleet, Place("r", 1, 200)) == "b"


def test_placements_teach_which_instance_holds_a_prefix() -> None:
    """A second request with the same prefix follows the first while that costs nothing; a death is forgotten."""
    fleet = fleet_of([view("a", running=4), view("b", running=4)])
    assert choose(fleet, Place("r1", 1, 4)) == "b"
    fleet.place(fleet.views[Peer("a", 1)], GATEWAY, Place("r1", 1, 100, prefix_names=(X,)), 0.0)
    fleet.on_report(Peer("a", 1), report(1, running=4, used=0, accepted=("r1",)), 0.0)
    assert choose(fleet, Place("r2", 1, 100, prefix_names=(X, Y))) == "a"
    fleet.remove(Peer("a", 1))
    assert choose(fleet, Place("r2", 1, 100, prefix_names=(X, Y))) == "b"

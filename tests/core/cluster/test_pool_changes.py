"""Instances that change their pool, or are not there, while requests wait or are on their way."""

from actorserve.core.effects import Send
from actorserve.core.messages import (
    Cordon,
    InstanceRole,
    Peer,
    PeerDown,
    Place,
    Placed,
    SetCordon,
    SetRole,
)
from tests.core.harness.coordinator import A, B, Coordinator, placements
from tests.core.harness.fleets import GATEWAY

MIXED, PROMPT, TOKEN = InstanceRole.MIXED, InstanceRole.PROMPT, InstanceRole.TOKEN
C = Peer("worker-2", 1)


def reserved(role: InstanceRole) -> Coordinator:
    """A coordinator that has reserved A for a long request, and B that has no room for that."""
    coordinator = Coordinator(A, B, promote_after_s=1.0)
    coordinator.report(A, 600, role=role)
    coordinator.report(B, 50, role=role)
    coordinator.place("long", 800)
    coordinator.place("new", 100, now=2.0)
    assert coordinator.reserved == {"worker-0": "long"}
    return coordinator


def test_a_reserved_instance_that_becomes_a_token_instance_is_released() -> None:
    """Requests start elsewhere from then on, so the room that is kept there would never be used."""
    coordinator = reserved(MIXED)
    orders = coordinator.state.operators.orders
    orders.assign(coordinator.state.fleet.views[A], TOKEN)
    coordinator.state.validate()
    assert coordinator.reserved == {}


def test_a_reserved_token_instance_is_released_once_a_prompt_instance_is_open() -> None:
    """Token instances are reserved only while there is no other instance."""
    coordinator = reserved(TOKEN)
    coordinator.up(C)
    coordinator.report(C, 50, 2.1, role=PROMPT)
    assert coordinator.reserved == {}


def test_a_request_for_token_instances_alone_waits_only_for_their_room() -> None:
    """The prompt instance can never hold it. It gets the token instance as soon as that one has room, although the
    cluster's line is short.
    """
    coordinator = Coordinator(A, B)
    coordinator.report(A, 1000, role=PROMPT, kv_total_bytes=500)
    coordinator.report(B, 100, role=TOKEN)
    assert coordinator.place("long", 700) == []
    assert coordinator.report(B, 900, 0.1, role=TOKEN) == [("long", "worker-1")]


def test_a_short_request_in_line_does_not_hide_a_long_one() -> None:
    """A short request waits for the prompt instance, and a long one, which only the token instance can hold, leaves."""
    coordinator = Coordinator(A, B)
    coordinator.report(A, 0, role=PROMPT, kv_total_bytes=500)
    coordinator.report(B, 0, role=TOKEN)
    assert coordinator.place("short", 100) == []
    assert coordinator.place("long", 700) == []
    assert coordinator.report(B, 900, 0.1, role=TOKEN) == [("long", "worker-1")]


def test_a_request_that_avoids_the_only_prompt_instance_gets_a_token_instance() -> None:
    coordinator = Coordinator(A, B)
    coordinator.report(A, 1000, role=PROMPT)
    coordinator.report(B, 50, role=TOKEN)
    assert coordinator.place("r", 100, avoid=A) == []
    assert coordinator.report(B, 900, 0.1, role=TOKEN) == [("r", "worker-1")]
    assert placements(coordinator.place("s", 100, now=0.1, avoid=A)) == [("s", "worker-1")]


def test_no_request_waits_for_a_prompt_instance_that_is_silent() -> None:
    """The prompt instance has not reported for long, so the token instance computes the prompt meanwhile."""
    coordinator = Coordinator(A, B, report_ttl_s=1.0)
    coordinator.report(A, 0, role=PROMPT)
    coordinator.report(B, 50, role=TOKEN)
    assert coordinator.place("r", 100) == []
    assert coordinator.report(B, 900, 2.0, role=TOKEN) == [("r", "worker-1")]
    assert placements(coordinator.place("s", 100, now=2.0)) == [("s", "worker-1")]


def test_a_repeated_answer_names_no_token_instance_that_is_gone() -> None:
    coordinator = Coordinator(A, B)
    coordinator.report(A, 1000, role=PROMPT)
    coordinator.report(B, 1000, role=TOKEN)
    place = Place("r", 1, 100)
    assert coordinator.handle(place, 0.0, GATEWAY) == [Send(GATEWAY, Placed("r", 1, A, token_instance=B))]
    assert coordinator.handle(place, 0.1, GATEWAY) == [Send(GATEWAY, Placed("r", 1, A, token_instance=B))]
    coordinator.handle(PeerDown(B), 0.2)
    assert coordinator.handle(place, 0.3, GATEWAY) == [Send(GATEWAY, Placed("r", 1, A))]


def test_a_role_that_is_taken_back_at_once_is_told_again() -> None:
    """No report has shown the first order yet, which the worker will obey."""
    coordinator = Coordinator(A, B)
    coordinator.report(A, 1000)
    view, orders = coordinator.state.fleet.views[A], coordinator.state.operators.orders
    assert orders.role(view, TOKEN) == [Send(A, SetRole(TOKEN))]
    assert orders.role(view, MIXED) == [Send(A, SetRole(MIXED))]
    coordinator.report(A, 1000, 0.1)
    assert view.role is MIXED
    assert orders.role(view, MIXED) == [], "nothing is on its way"


def test_a_cordon_that_is_taken_back_at_once_is_told_again() -> None:
    """A late report may still show the first order. Then the worker is told once more."""
    coordinator = Coordinator(A)
    coordinator.report(A, 1000)
    view, orders = coordinator.state.fleet.views[A], coordinator.state.operators.orders
    assert orders.cordon(A.name, Cordon.EMPTYING) == [Send(A, SetCordon(Cordon.EMPTYING))]
    assert orders.cordon(A.name, Cordon.OPEN) == [Send(A, SetCordon(Cordon.OPEN))]
    coordinator.report(A, 1000, 0.1)
    assert orders.on_report(view) == []
    coordinator.report(A, 1000, 0.2, cordon=Cordon.EMPTYING)
    assert view.cordon is Cordon.OPEN
    assert orders.on_report(view) == [Send(A, SetCordon(Cordon.OPEN))]
    coordinator.report(A, 1000, 0.3)
    assert orders.on_report(view) == []

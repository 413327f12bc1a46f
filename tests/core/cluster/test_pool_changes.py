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
    coordinator = reserved(PROMPT)
    orders = coordinator.state.operators.orders
    orders.assign(coordinator.state.fleet.views[A], TOKEN)
    coordinator.state.validate()
    assert coordinator.reserved == {}


def test_a_reserved_token_instance_is_released_once_a_prompt_instance_is_open() -> None:
    """Token instances are reserved only for what no prompt instance could hold."""
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


def test_a_request_for_token_instances_alone_waits_for_no_full_mixed_one() -> None:
    """No prompt instance could hold it, so a token instance computes its prompt, too, as it would at arrival."""
    coordinator = Coordinator(A, B, C)
    coordinator.report(A, 1000, role=PROMPT, kv_total_bytes=500)
    coordinator.report(B, 0, role=MIXED)
    coordinator.report(C, 0, role=TOKEN)
    assert coordinator.place("long", 700) == []
    assert coordinator.report(C, 1000, 0.1, role=TOKEN) == [("long", "worker-2")]


def test_a_token_instance_is_reserved_for_a_request_for_token_instances_alone() -> None:
    """Otherwise short requests that are handed over there would take all room that becomes free."""
    coordinator = Coordinator(A, B, promote_after_s=1.0)
    coordinator.report(A, 1000, role=PROMPT, kv_total_bytes=500)
    coordinator.report(B, 600, role=TOKEN)
    assert coordinator.place("long", 800) == []
    coordinator.place("short", 100, now=2.0)
    assert coordinator.reserved == {"worker-1": "long"}
    coordinator.report(A, 1000, 2.1, role=PROMPT, kv_total_bytes=500)
    assert coordinator.reserved == {"worker-1": "long"}
    assert coordinator.report(B, 800, 2.2, role=TOKEN) == [("long", "worker-1")]


def test_a_reservation_lasts_whatever_other_kinds_do() -> None:
    """Kind "a" has no prompt instance, so its token instance is reserved for a request that keeps to this kind."""
    coordinator = Coordinator(promote_after_s=1.0)
    coordinator.up(A, kind="a")
    coordinator.up(B, kind="b")
    coordinator.report(A, 600, role=TOKEN)
    coordinator.report(B, 1000, role=PROMPT)
    coordinator.handle(Place("long", 1, 800, kind="a"), 0.0, GATEWAY)
    coordinator.handle(Place("short", 1, 100), 2.0, GATEWAY)
    assert coordinator.reserved == {"worker-0": "long"}
    coordinator.report(B, 1000, 2.1, role=PROMPT)
    assert coordinator.reserved == {"worker-0": "long"}


def test_a_request_that_outgrew_its_kind_is_not_hidden_by_a_shorter_one() -> None:
    """Both began on kind "a", and only the short one keeps to it, because the other kind can hold the long one."""
    coordinator = Coordinator()
    coordinator.up(A, kind="a")
    coordinator.up(B, kind="b")
    coordinator.report(A, 0, kv_total_bytes=500)
    coordinator.report(B, 0)
    for name, num_tokens in (("short", 100), ("long", 700)):
        assert coordinator.handle(Place(name, 1, num_tokens, kind="a"), 0.0, GATEWAY) == []
    assert coordinator.report(B, 900, 0.1) == [("long", "worker-1")]


def test_a_request_that_moved_on_counts_nowhere_else() -> None:
    """The token instance that was chosen has declined it, and another one has accepted it."""
    coordinator = Coordinator(A, B, C)
    coordinator.report(A, 1000, role=PROMPT)
    coordinator.report(B, 900, role=TOKEN)
    coordinator.report(C, 800, role=TOKEN)
    coordinator.place("r", 500)
    coordinator.report(A, 500, 0.1, role=PROMPT)
    first = coordinator.state.fleet.views[B]
    assert first.num_handoffs == 1
    coordinator.report(C, 300, 1.0, role=TOKEN, accepted=("r",))
    assert first.num_handoffs == 0


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


def test_a_role_that_a_late_report_does_not_show_is_told_again() -> None:
    coordinator = Coordinator(A)
    coordinator.report(A, 1000)
    view, orders = coordinator.state.fleet.views[A], coordinator.state.operators.orders
    orders.role(view, TOKEN)
    orders.role(view, MIXED)
    coordinator.report(A, 1000, 0.1)
    coordinator.report(A, 1000, 0.2, role=TOKEN)
    assert view.role is MIXED
    assert orders.on_report(view) == [Send(A, SetRole(MIXED))]


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

"""Orders of operators that hold under the next coordinator: gateways and workers keep them, and tell them to it."""

from itertools import count

import pytest

from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.effects import Effect, Send
from actorserve.core.messages import (
    Answer,
    Command,
    Cordon,
    InstanceRole,
    Message,
    Orders,
    Outcome,
    Peer,
    PeerDown,
    PeerUp,
    Role,
    Serve,
    SetRole,
)
from actorserve.core.migration.pairing import PairingConfig
from actorserve.core.operations.kept_orders import MAX_ORDERS, KeptOrders
from actorserve.core.operations.tables import rows
from tests.core.harness.coordinator import A, B, Coordinator
from tests.core.harness.fleets import GATEWAY

CALLER = Peer("console:local", 1)
_IDS = count()
SCALING = ScalingConfig(max_workers=8, scale_out_below=1.0, scale_in_above=5.0)


def _serving(term: int, *workers: Peer) -> Coordinator:
    """A coordinator that serves in ``term``, with a gateway."""
    coordinator = Coordinator(*workers, scaling=SCALING, migration=PairingConfig())
    coordinator.handle(Serve(term, f"coordinator-{term}"), 0.0)
    coordinator.handle(PeerUp(GATEWAY, Role.GATEWAY), 0.0)
    return coordinator


def _order(coordinator: Coordinator, verb: str, *arguments: str, dry_run: bool = False) -> list[Effect]:
    command = Command(f"{next(_IDS)}", verb, arguments, dry_run)
    effects = coordinator.handle(command, 0.0, CALLER)
    (answer,) = [message for message in _told(effects, CALLER) if isinstance(message, Answer)]
    assert answer.outcome is Outcome.DONE, answer.text
    return effects


def _told(effects: list[Effect], peer: Peer) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, Send) and effect.to == peer]


def _orders(effects: list[Effect], peer: Peer) -> Orders:
    (found,) = [message for message in _told(effects, peer) if isinstance(message, Orders)]
    return found


def _kept(coordinator: Coordinator) -> Orders:
    """What a gateway that comes now is told."""
    return _orders(coordinator.handle(PeerUp(Peer("gateway-9", 1), Role.GATEWAY), 0.0), Peer("gateway-9", 1))


def test_an_order_goes_to_all_followers_and_to_those_that_come_later() -> None:
    """The gateway and the workers are told at once, and a new worker when it is up; a dry run tells nobody."""
    coordinator = _serving(10, A, B)
    assert not [e for e in _order(coordinator, "set", "migration.rest_s", "2.5", dry_run=True) if _told([e], GATEWAY)]
    effects = _order(coordinator, "set", "migration.rest_s", "2.5")
    expected = Orders(("set",), ("migration.rest_s",), ("2.5",), (10,), (1,))
    assert [_orders(effects, peer) for peer in (GATEWAY, A, B)] == [expected] * 3
    assert _kept(coordinator) == expected


def test_the_next_coordinator_tells_what_was_set() -> None:
    """A console's ``config`` shows the value that applies, whichever coordinator it was set in."""
    first = _serving(10, A)
    _order(first, "set", "migration.rest_s", "2.5")
    assert first.state.settings_set == {"migration.rest_s": "2.5"}
    second = _serving(11, A)
    assert not second.state.settings_set
    second.handle(_kept(first), 2.0, GATEWAY)
    assert second.state.settings_set == {"migration.rest_s": "2.5"}


def test_the_cordon_of_a_worker_that_is_down_outlives_its_coordinator() -> None:
    """The next coordinator cordons the worker when it is back, and knows its name before."""
    first = _serving(10, A, B)
    _order(first, "cordon", A.name)
    first.handle(PeerDown(A), 1.0)
    second = _serving(11, B)
    second.handle(_kept(first), 2.0, GATEWAY)
    assert second.state.operators.orders.cordons == {A.name: Cordon.CORDONED}
    second.up(A)
    second.report(A, 900)
    assert second.state.fleet.views[A].cordon is Cordon.CORDONED
    _order(second, "uncordon", A.name)
    assert second.state.fleet.views[A].cordon is Cordon.OPEN


def test_a_role_that_an_operator_ordered_stays_under_the_next_coordinator() -> None:
    """Pools that follow the load leave this worker's role alone, but not that of the worker's successor."""
    first = _serving(10, A)
    first.report(A, 900)
    _order(first, "role", A.name, "token")
    second = _serving(11)
    second.handle(_kept(first), 2.0, GATEWAY)
    second.up(A)
    second.report(A, 900, role=InstanceRole.TOKEN)
    assert second.state.operators.orders.with_roles == {A}
    second.handle(PeerDown(A), 3.0)
    second.up(Peer(A.name, A.incarnation + 1))
    assert second.state.operators.orders.with_roles == set()


@pytest.mark.parametrize("has_reported", [False, True])
def test_a_role_that_the_worker_never_heard_of_is_told_by_the_next_coordinator(has_reported: bool) -> None:
    """The first coordinator has answered that it is done, and has died before its message left."""
    first = _serving(10, A)
    first.report(A, 900)
    _order(first, "role", A.name, "token")
    second = _serving(11, A)
    if has_reported:
        second.report(A, 900)
    told = second.handle(_kept(first), 2.0, GATEWAY)
    assert (Send(A, SetRole(InstanceRole.TOKEN)) in told) is has_reported
    second.report(A, 900, 2.1)
    assert second.state.fleet.views[A].role is InstanceRole.TOKEN
    assert second.state.operators.orders.on_report(second.state.fleet.views[A]) == [
        Send(A, SetRole(InstanceRole.TOKEN))
    ]


def test_a_cordon_that_was_taken_back_is_not_learned_from_an_old_report() -> None:
    """A worker that still reports its cordon is told again that it is open."""
    first = _serving(10, A)
    _order(first, "cordon", A.name)
    _order(first, "uncordon", A.name)
    second = _serving(11, A)
    second.handle(_kept(first), 2.0, GATEWAY)
    second.report(A, 900, cordon=Cordon.CORDONED)
    assert second.state.fleet.views[A].cordon is Cordon.OPEN


def test_values_and_targets_outlive_their_coordinator() -> None:
    """Settings, the number of workers and the power budget are those that an operator set last."""
    first = _serving(10, A)
    for words in ("set migration.rest_s 9", "set migration.rest_s 2.5", "scale 3", "budget 900"):
        _order(first, *words.split())
    second = _serving(11, A)
    second.handle(_kept(first), 2.0, GATEWAY)
    assert second.state.pairing is not None
    assert second.state.scaling is not None
    assert second.state.pairing.config.rest_s == 2.5
    assert second.state.scaling.target == 3
    assert second.state.power.governor.budget_watts == 900
    told = [row for row in rows(_events(second).columns) if "order" in row]
    assert [row[-1] for row in told] == [
        f"it holds from an earlier coordinator: {what}"
        for what in ("set migration.rest_s 2.5", "scale 3", "budget 900")
    ]


def _events(coordinator: Coordinator) -> Answer:
    effects = coordinator.handle(Command("events", "events"), 0.0, CALLER)
    (answer,) = _told(effects, CALLER)
    assert isinstance(answer, Answer)
    return answer


def test_bounds_that_depend_on_each_other_are_all_set() -> None:
    """The last values hold, whatever the sequence in which they were set."""
    first = _serving(10)
    for words in ("scaling.scale_in_above 20", "scaling.scale_out_below 10", "scaling.scale_in_above 30"):
        _order(first, "set", *words.split())
    second = _serving(11)
    second.handle(_kept(first), 2.0, GATEWAY)
    assert second.state.scaling is not None
    assert (second.state.scaling.config.scale_out_below, second.state.scaling.config.scale_in_above) == (10, 30)


def test_the_budget_of_a_host_is_set_once_the_host_is_up() -> None:
    """The next coordinator does not know the host when it is told the order."""
    worker = Peer("beta/worker-0", 1)
    first = _serving(10, worker)
    _order(first, "budget", "700", "beta")
    second = _serving(11)
    second.handle(_kept(first), 2.0, GATEWAY)
    assert second.state.power.governor.budget_watts_of == {}
    second.up(worker)
    assert second.state.power.governor.budget_watts_of == {"beta": 700}


def test_the_budget_of_a_host_without_workers_is_set_once_its_actuator_is_up() -> None:
    """Its workers may have ended, and its devices still take power. An actuator keeps no orders."""
    actuator = Peer("beta/power", 1)
    first = _serving(10)
    first.handle(PeerUp(actuator, Role.POWER), 0.0)
    _order(first, "budget", "700", "beta")
    second = _serving(11)
    second.handle(_kept(first), 2.0, GATEWAY)
    assert _told(second.handle(PeerUp(actuator, Role.POWER), 3.0), actuator) == []
    assert second.state.power.governor.budget_watts_of == {"beta": 700}


def test_later_orders_hold() -> None:
    """An order of a newer term, or a later one of the same term, is kept whichever follower tells its orders first, and
    followers that lack it are told.
    """
    first = _serving(10, A)
    early = _orders(_order(first, "set", "migration.rest_s", "2"), GATEWAY)
    late = _orders(_order(first, "set", "migration.rest_s", "3"), GATEWAY)
    second = _serving(11, A)
    assert _orders(second.handle(early, 1.0, A), GATEWAY) == early
    assert _orders(second.handle(late, 1.0, GATEWAY), A) == late
    assert second.handle(early, 1.0, A) == []
    newest = _orders(_order(second, "set", "migration.rest_s", "4"), GATEWAY)
    assert second.handle(late, 1.0, A) == []
    third = _serving(20, A)
    third.handle(newest, 1.0, A)
    third.handle(late, 1.0, GATEWAY)
    assert third.state.pairing is not None
    assert third.state.pairing.config.rest_s == 4


def test_orders_of_strangers_and_of_other_versions_change_nothing() -> None:
    """Only followers tell orders; an unknown verb, a wrong value and a number without end are passed over."""
    coordinator = _serving(10, A)
    before = coordinator.state.pairing.config if coordinator.state.pairing is not None else None
    wrong = Orders(
        ("juggle", "cordon", "set", "set", "scale"),
        ("x", A.name, "no.such", "migration.rest_s", ""),
        ("1", "sideways", "1", "many", "-"),
        (10,) * 5,
        (1, 2, 3, 4, 5),
    )
    coordinator.handle(wrong, 1.0, CALLER)
    assert coordinator.state.num_stale_messages == 1
    coordinator.handle(wrong, 1.0, GATEWAY)
    endless = Orders(("scale",), ("",), ("2",), (10,), (2**62,))
    assert coordinator.handle(endless, 1.0, GATEWAY) == []
    assert coordinator.state.pairing is not None
    assert coordinator.state.pairing.config == before
    assert coordinator.state.operators.orders.cordons == {}
    assert coordinator.state.scaling is not None
    assert coordinator.state.scaling.target is None


def test_orders_can_be_given_after_any_that_a_false_follower_tells() -> None:
    """Numbers of earlier terms do not count in ours, and orders of our term or of a later one are ignored."""
    last = 2**62 - 1
    kept = KeptOrders()
    coordinator = _serving(20, A)
    for term in (11, 20, 21, last):
        coordinator.handle(Orders(("set",), ("migration.rest_s",), ("9",), (term,), (last,)), 1.0, A)
    for value in ("2", "3"):
        orders = _orders(_order(coordinator, "set", "migration.rest_s", value), GATEWAY)
        assert [order.value for order in kept.merge(orders)] == [value]
    assert coordinator.state.settings_set == {"migration.rest_s": "3"}


def test_the_orders_that_are_kept_are_limited_in_number() -> None:
    """A process that is told more keeps those that it has, and their changes."""
    kept = KeptOrders()
    for number in range(MAX_ORDERS + 1):
        kept.add("cordon", f"worker-{number}", "open", 10)
    kept.add("cordon", "worker-0", "cordoned", 10)
    message = kept.message()
    assert message is not None
    assert len(message.subjects) == MAX_ORDERS
    assert dict(zip(message.subjects, message.values, strict=True))["worker-0"] == "cordoned"

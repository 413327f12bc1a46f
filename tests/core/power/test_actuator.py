"""The actuator obeys the serving coordinator alone, and knows what to do without one."""

from dataclasses import replace

from actorserve.core.effects import Effect, PutBackLimits, ReadPower, Send, SetCaps
from actorserve.core.messages import (
    DevicePower,
    Drain,
    Peer,
    PeerDown,
    PeerUp,
    PowerRead,
    PowerReport,
    Role,
    SetPowerCaps,
    Tick,
)
from actorserve.core.power.actuator import ActuatorConfig, ActuatorState
from tests.core.power.plant import h100

COORDINATOR, OTHER = Peer("coordinator", 1), Peer("coordinator", 2)
UP = PeerUp(COORDINATOR, Role.COORDINATOR, term=1)


def test_caps_come_from_the_serving_coordinator_alone() -> None:
    """Other senders, old numbers and other messages set nothing."""
    state = ActuatorState(ActuatorConfig())
    order = SetPowerCaps(1, ("x",), (300.0,))
    assert state.handle(order, 0.0, COORDINATOR) == []
    state.handle(UP, 0.0)
    assert state.handle(order, 0.1, Peer("worker-0", 1)) == []
    assert state.handle(order, 0.1, OTHER) == []
    assert state.handle(Drain(), 0.1, COORDINATOR) == []
    assert state.handle(order, 0.2, COORDINATOR) == [SetCaps(("x",), (300.0,)), ReadPower()]
    assert state.handle(order, 0.3, COORDINATOR) == [], "it was carried out"
    assert state.num_refused == 4


def test_each_reading_is_reported_with_the_number_of_the_last_order() -> None:
    """Readings go to the coordinator, and a new one starts to count at 0."""
    state = ActuatorState(ActuatorConfig())
    state.handle(UP, 0.0)
    state.handle(SetPowerCaps(7, (), ()), 0.1, COORDINATOR)
    read = PowerRead((h100("x"),), 1234.0)
    assert state.handle(read, 0.1) == [Send(COORDINATOR, PowerReport(7, read.devices, 1234.0))]
    state.handle(PeerDown(COORDINATOR), 0.2)
    assert state.handle(read, 0.2) == []
    state.handle(PeerUp(OTHER, Role.COORDINATOR, term=2), 0.3)
    assert state.handle(read, 0.3) == [Send(OTHER, PowerReport(0, read.devices, 1234.0))]


def test_devices_are_read_all_the_time() -> None:
    """Each deadline reads once."""
    state = ActuatorState(ActuatorConfig())
    assert state.handle(Tick(), 1.0) == [ReadPower()]
    assert state.handle(Tick(), 1.1) == []
    assert state.next_deadline() == 1.25
    assert state.handle(Tick(), 1.25) == [ReadPower()]


def test_a_forgotten_cap_is_set_again() -> None:
    """A device that has a higher cap than the one that was set gets it again after a while, if it can be set."""
    state = ActuatorState(ActuatorConfig())
    state.handle(UP, 0.0)
    state.handle(SetPowerCaps(1, ("x", "y"), (300.0, 300.0)), 0.0, COORDINATOR)
    forgot = PowerRead((h100("x"), replace(h100("y"), can_set=False), h100("z")))
    assert len(state.handle(forgot, 1.0)) == 1, "it may still come"
    assert state.handle(forgot, 6.0)[1:] == [SetCaps(("x",), (300.0,))]
    assert state.num_forgotten == 1


def test_a_raise_that_a_device_refused_is_not_set_again() -> None:
    """The governor may have given its watts to another device, so the sum would pass the budget."""
    state = ActuatorState(ActuatorConfig())
    state.handle(UP, 0.0)
    state.handle(SetPowerCaps(1, ("x",), (600.0,)), 0.0, COORDINATOR)
    assert len(state.handle(PowerRead((h100("x", 400.0),)), 60.0)) == 1
    assert state.num_forgotten == 0


def alone(budget: float | None, *devices: DevicePower) -> list[Effect]:
    """What an actuator does that has had no coordinator for a minute, with a coordinator's caps before."""
    state = ActuatorState(ActuatorConfig(budget, alone_after_s=60.0))
    state.handle(UP, 0.0)
    state.handle(SetPowerCaps(1, ("x", "y"), (700.0, 350.0), budget), 0.0, COORDINATOR)
    held = PowerRead(tuple(devices))
    state.handle(PeerDown(COORDINATOR), 10.0)
    assert not [effect for effect in state.handle(held, 69.0) if isinstance(effect, SetCaps)], "it holds the caps"
    effects = state.handle(held, 70.0)
    assert not [effect for effect in state.handle(held, 71.0) if isinstance(effect, SetCaps)], "once"
    return effects


def test_without_a_coordinator_the_budget_is_shared_evenly() -> None:
    """After the stated time every device gets the same part of its way, what becomes lower first."""
    assert alone(1050.0, h100("x", 700.0), h100("y", 350.0)) == [SetCaps(("x", "y"), (525.0, 525.0)), ReadPower()]
    fixed = replace(h100("y", 600.0), can_set=False)
    assert alone(1050.0, h100("x", 700.0), fixed) == [SetCaps(("x",), (450.0,)), ReadPower()]


def test_without_a_budget_the_caps_are_held_for_ever() -> None:
    """Nothing is to be shared."""
    assert alone(None, h100("x", 700.0), h100("y", 350.0)) == []


def test_a_device_that_comes_back_shares_the_budget_as_well() -> None:
    """Without a coordinator, devices that were not there when the budget was shared get their part when they are."""
    state = ActuatorState(ActuatorConfig(1050.0, alone_after_s=60.0))
    state.handle(Tick(), 0.0)
    assert state.handle(PowerRead((h100("x"),)), 60.0) == [SetCaps(("x",), (700.0,)), ReadPower()]
    both = PowerRead((h100("x"), h100("y")))
    assert state.handle(both, 61.0) == [SetCaps(("x", "y"), (525.0, 525.0)), ReadPower()]
    assert state.handle(both, 62.0) == []


def test_a_coordinator_without_a_budget_gets_the_former_limits_back() -> None:
    """Caps of an earlier coordinator are lifted when the next one orders nothing for a while, and then held no more."""
    state = ActuatorState(ActuatorConfig(alone_after_s=60.0))
    state.handle(UP, 0.0)
    read = PowerRead((h100("x", 300.0),))
    assert len(state.handle(read, 100.0)) == 1, "it has set nothing itself"
    state.handle(SetPowerCaps(1, ("x",), (300.0,), 300.0), 100.0, COORDINATOR)
    state.handle(PeerDown(COORDINATOR), 200.0)
    state.handle(PeerUp(OTHER, Role.COORDINATOR, term=2), 201.0)
    assert len(state.handle(read, 205.9)) == 1, "it may have a budget and not know of the devices yet"
    assert state.handle(read, 206.0)[1:] == [PutBackLimits(), ReadPower()]
    assert len(state.handle(PowerRead((h100("x"),)), 300.0)) == 1
    state.handle(PeerDown(OTHER), 300.0)
    assert state.handle(read, 400.0) == [], "and there is no budget to share"


def test_a_coordinator_that_orders_keeps_the_caps() -> None:
    """An order without devices is one, too: its sender governs, and has nothing to change."""
    state = ActuatorState(ActuatorConfig())
    state.handle(UP, 0.0)
    state.handle(SetPowerCaps(1, ("x",), (300.0,)), 0.0, COORDINATOR)
    state.handle(PeerDown(COORDINATOR), 1.0)
    state.handle(PeerUp(OTHER, Role.COORDINATOR, term=2), 2.0)
    state.handle(SetPowerCaps(1, (), ()), 3.0, OTHER)
    assert len(state.handle(PowerRead((h100("x", 300.0),)), 100.0)) == 1


def test_no_even_part_is_below_a_devices_least_power() -> None:
    """A part is whole watts, or the device's least power, because the device would refuse less."""
    x, y = h100("x", 700.0, least=200.5), h100("y", 350.0, least=200.5)
    [effect, _] = alone(401.5, x, y)
    assert effect == SetCaps(("x", "y"), (200.5, 200.5))


def test_devices_that_can_be_set_again_share_the_budget() -> None:
    """Without a coordinator, a driver that hangs just when the budget is due to be shared shares it when it answers."""
    state = ActuatorState(ActuatorConfig(1050.0, alone_after_s=60.0))
    state.handle(Tick(), 0.0)
    devices = (h100("x"), h100("y"))
    hanging = PowerRead(tuple([replace(power, draw_watts=None, can_set=False) for power in devices]))
    assert not [effect for effect in state.handle(hanging, 60.0) if isinstance(effect, SetCaps)]
    assert state.handle(PowerRead(devices), 61.0) == [SetCaps(("x", "y"), (525.0, 525.0)), ReadPower()]
    assert state.handle(PowerRead(devices), 62.0) == []

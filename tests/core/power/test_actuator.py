"""The actuator obeys the serving coordinator alone, and knows what to do without one."""

from collections.abc import Callable
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


class Alone:
    """An actuator without a coordinator, and its devices, which do what ``obeys`` says. ``caps`` are those that an
    earlier coordinator left.
    """

    def __init__(self, budget: float | None, *devices: DevicePower, caps: dict[str, float] | None = None) -> None:
        self.state = ActuatorState(ActuatorConfig(budget, alone_after_s=60.0))
        self.devices = {power.device: power for power in devices}
        self.obeys: Callable[[str, float], float] = lambda _, watts: watts
        self.sets: list[dict[str, float]] = []
        self.most_watts = 0.0
        """The highest sum of the caps so far."""
        self.now = 0.0
        if caps is not None:
            self.state.handle(UP, 0.0)
            self.state.handle(SetPowerCaps(1, tuple(caps), tuple(caps.values()), budget), 0.0, COORDINATOR)
            self.state.handle(PeerDown(COORDINATOR), 0.0)

    def run(self, seconds: float) -> None:
        """Read four times a second, and after each order."""
        for _ in range(round(4 * seconds)):
            self._carry(self.state.handle(Tick(), self.now))
            self.now += 0.25

    def caps(self) -> dict[str, float | None]:
        return {name: power.cap_watts for name, power in self.devices.items()}

    def _carry(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SetCaps):
                self.sets.append(dict(zip(effect.devices, effect.caps_watts, strict=True)))
                for name, watts in self.sets[-1].items():
                    self.devices[name] = replace(self.devices[name], cap_watts=self.obeys(name, watts))
                    self.most_watts = max(self.most_watts, sum(power.cap_watts or 0.0 for power in self._all()))
            else:
                assert effect == ReadPower()
                self._carry(self.state.handle(PowerRead(self._all()), self.now))

    def _all(self) -> tuple[DevicePower, ...]:
        return tuple(self.devices.values())


def test_without_a_coordinator_the_budget_is_shared_evenly() -> None:
    """After the stated time every device gets the same part of its way, and then nothing changes."""
    host = Alone(1050.0, h100("x", 700.0), h100("y", 350.0), caps={"x": 700.0, "y": 350.0})
    host.run(60.0)
    assert host.sets == [], "it holds the caps"
    host.run(60.0)
    assert host.sets == [{"x": 525.0}, {"y": 525.0}]
    host = Alone(1050.0, h100("x", 700.0), replace(h100("y", 600.0), can_set=False))
    host.run(120.0)
    assert host.sets == [{"x": 450.0}]


def test_without_a_coordinator_caps_fall_before_others_rise() -> None:
    """A cap rises by watts that no other device has any more, whichever ones come down."""
    host = Alone(1050.0, h100("x", 700.0), h100("y", 350.0), caps={"x": 700.0, "y": 350.0})
    host.obeys = lambda name, watts: 700.0 if name == "x" else watts
    host.run(120.0)
    assert host.most_watts == 1050.0
    assert host.caps() == {"x": 700.0, "y": 350.0}
    host.obeys = lambda _, watts: watts
    host.run(10.0)
    assert host.most_watts == 1050.0
    assert host.caps() == {"x": 525.0, "y": 525.0}


def test_without_a_coordinator_others_pay_for_a_device_that_does_not_come_down() -> None:
    """The budget holds a second later, and without a change when that device is told again."""
    host = Alone(1050.0, h100("x"), h100("y"))
    host.obeys = lambda name, watts: 700.0 if name == "x" else watts
    host.run(62.0)
    assert host.caps() == {"x": 700.0, "y": 350.0}
    host.sets.clear()
    host.run(60.0)
    assert {name for caps in host.sets for name in caps} == {"x"}


def test_a_cap_that_is_forgotten_without_a_coordinator_is_set_again() -> None:
    """The other devices keep theirs."""
    host = Alone(1050.0, h100("x"), h100("y"))
    host.run(90.0)
    host.sets.clear()
    host.devices["x"] = h100("x")
    host.run(10.0)
    assert host.sets == [{"x": 525.0}]


def test_without_a_coordinator_a_host_takes_no_more_than_it_was_left() -> None:
    """Other hosts may have the rest of the cluster's budget, so the sum of the caps does not rise."""
    host = Alone(1400.0, h100("x", 600.0), h100("y", 300.0), caps={"x": 600.0, "y": 300.0})
    host.run(120.0)
    assert host.caps() == {"x": 450.0, "y": 450.0}
    assert host.most_watts == 900.0


def test_without_a_budget_the_caps_are_held_for_ever() -> None:
    """Nothing is to be shared."""
    host = Alone(None, h100("x", 700.0), h100("y", 350.0), caps={"x": 700.0, "y": 350.0})
    host.run(120.0)
    assert host.sets == []


def test_a_device_that_comes_back_shares_the_budget_as_well() -> None:
    """Without a coordinator, devices that were not there when the budget was shared get their part when they are."""
    host = Alone(1050.0, h100("x"))
    host.run(90.0)
    assert host.sets == []
    host.devices["y"] = h100("y")
    host.run(1.0)
    assert host.caps() == {"x": 525.0, "y": 525.0}


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
    host = Alone(401.5, h100("x", 700.0, least=200.5), h100("y", 350.0, least=200.5))
    host.run(90.0)
    assert host.caps() == {"x": 200.5, "y": 200.5}


def test_devices_that_can_be_set_again_share_the_budget() -> None:
    """Without a coordinator, a driver that hangs just when the budget is due to be shared shares it when it answers."""
    devices = (h100("x"), h100("y"))
    host = Alone(1050.0, *[replace(power, draw_watts=None, can_set=False) for power in devices])
    host.run(90.0)
    assert host.sets == []
    host.devices = {power.device: power for power in devices}
    host.run(10.0)
    assert host.sets == [{"x": 525.0, "y": 525.0}]

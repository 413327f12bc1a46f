"""Whatever happens, the governor keeps feasible budgets, stays within constraints, and lets no cap flap."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import HealthCheck, given, settings, strategies as st

from actorserve.core.power.governor import DeviceId, PowerConfig, Use
from tests.core.power.plant import MIXED, PROMPT, TOKEN, Plant, equal_pools, h100

ROLES = (None, PROMPT, MIXED, TOKEN)


class Checked:
    """A plant with random happenings, checked at every change of a cap."""

    def __init__(self, data: st.DataObject) -> None:
        self._draw = data.draw
        devices = {}
        for host in ("a", "b"):
            for index in range(self._draw(st.integers(1, 4))):
                least = self._draw(st.integers(50, 300))
                most = self._draw(st.integers(least, 800))
                name = f"{host}{index}"
                devices[DeviceId(host, name)] = h100(name, self._draw(st.integers(least, most)), least, most)
        delays = st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.3, None])
        self.plant = Plant(PowerConfig(hold_s=3.0), devices)
        self._were_met: dict[str | None, bool] = {}
        for key in devices:
            self._use(key)
        self.plant.run(0.5)  # the governor knows all devices
        self.plant.delay_s = lambda: self._draw(delays)
        self.plant.on_change = self.check

    def _use(self, key: DeviceId) -> None:
        role = self._draw(st.sampled_from(ROLES))
        self.plant.uses.pop(key, None)
        if role is not None:
            self.plant.uses[key] = Use(role, self._draw(st.sampled_from([None, 0.03, 0.3])))

    def happen(self) -> None:
        """Change a budget or a role, let a device forget its cap, or let one fall off."""
        plant, key = self.plant, self._draw(st.sampled_from(sorted(self.plant.devices)))
        match self._draw(st.sampled_from(["budget", "budget", "role", "forgets", "falls off", "heat"])):
            case "budget":
                scope = self._draw(st.sampled_from([None, "a", "b"]))
                plant.governor.set_budget(scope, self._draw(st.none() | st.integers(100, 5000)))
            case "role":
                self._use(key)
            case "forgets":
                power = plant.devices[key]
                plant.devices[key] = replace(power, cap_watts=power.usual_watts, enforced_watts=power.usual_watts)
                plant.on_change, plant.delay_s, delay_s = lambda: None, lambda: 0.0, plant.delay_s
                plant.run(0.5)  # until then the governor may raise another cap, because it does not know of this one
                plant.on_change, plant.delay_s = self.check, delay_s
            case "falls off" if len(plant.devices) > 2:
                del plant.devices[key]
                plant.uses.pop(key, None)
            case "heat":
                power = plant.devices[key]
                plant.devices[key] = replace(
                    power, is_throttled=not power.is_throttled, draw_watts=0.8 * (power.cap_watts or 0.0)
                )
        self._were_met.clear()

    def budgets(self) -> list[tuple[str | None, float]]:
        """The budgets, None for the cluster's."""
        governor = self.plant.governor
        everywhere = [] if governor.budget_watts is None else [(None, governor.budget_watts)]
        return [*everywhere, *governor.budget_watts_of.items()]

    def least(self, scope: str | None) -> float:
        return sum(power.least_watts for key, power in self.plant.devices.items() if scope in (None, key.host))

    def check(self) -> None:
        """A budget that was met once stays met at every change, until something happens."""
        for scope, budget in self.budgets():
            is_met = self.plant.caps(scope) <= budget
            assert is_met or not self._were_met.get(scope), f"the caps passed the budget of {scope or 'the cluster'}"
            self._were_met[scope] = is_met

    def settle(self) -> None:
        """Let everything arrive, for as long as a ceiling lasts; feasible budgets are then met, and nothing moves."""
        plant = self.plant
        plant.delay_s = lambda: 0.0
        plant.run(40.0)
        for scope, budget in self.budgets():
            assert plant.caps(scope) <= max(budget, self.least(scope)) + 1e-6
        plant.orders.clear()
        plant.run(20.0)
        assert plant.orders == [], "caps move although nothing happens"


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None, max_examples=40)
@given(data=st.data())
def test_whatever_happens_feasible_budgets_are_kept(data: st.DataObject) -> None:
    """Caps stay within constraints; a feasible budget is met after the settling time, stays met on the way to other
    caps, and then nothing moves.
    """
    checked = Checked(data)
    for _ in range(data.draw(st.integers(1, 4))):
        checked.happen()
        checked.plant.run(data.draw(st.sampled_from([0.5, 1.0, 4.0])))
        for power in checked.plant.devices.values():
            assert power.least_watts <= (power.cap_watts or 0.0) <= power.most_watts
    checked.settle()


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None, max_examples=40)
@given(data=st.data())
def test_no_cap_flaps(data: st.DataObject) -> None:
    """Under noise, roles that change all the time and no change of a budget, no cap rises within ``hold_s`` after it
    fell.
    """
    plant = equal_pools(2, budget=data.draw(st.integers(900, 2700)))
    for _ in range(30):
        key = data.draw(st.sampled_from(sorted(plant.devices)))
        if data.draw(st.booleans()):
            plant.uses[key] = Use(data.draw(st.sampled_from([PROMPT, TOKEN, MIXED])))
        draw = data.draw(st.floats(0.5, 1.02)) * (plant.devices[key].cap_watts or 0.0)
        plant.devices[key] = replace(plant.devices[key], draw_watts=draw)
        plant.run(0.5)
    for key in plant.devices:
        mine = [change for change in plant.changes if change[1] == key]
        for (fell_s, _, before, after), (rose_s, _, low, high) in pairwise(mine):
            assert after > before or high < low or rose_s - fell_s >= plant.config.hold_s - 0.25

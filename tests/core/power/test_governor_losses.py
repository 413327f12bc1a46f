"""What a governor makes of devices, actuators and readings that are lost for a while, and of orders that fail."""

from dataclasses import replace

from actorserve.core.messages import Peer, PowerReport
from actorserve.core.power.governor import DeviceId, PowerConfig, Use
from tests.core.power.plant import PROMPT, Plant, equal_pools, h100


def test_full_power_comes_back_though_one_order_fails() -> None:
    """A device that keeps its cap once when it is raised is told again after some minutes, also without budgets."""
    plant = equal_pools(1, budget=1050.0)
    plant.run(6.0)
    assert plant.cap("t0") == 350.0
    failures = [DeviceId("a", "t0")]

    def fails_once(key: DeviceId, watts: float) -> float:
        if key not in failures:
            return watts
        failures.remove(key)
        return plant.devices[key].cap_watts or 0.0

    plant.obeys = fails_once
    plant.governor.set_budget("a", None)
    plant.run(5.0)
    assert plant.cap("t0") == 350.0
    plant.run(301.0)
    assert plant.cap("t0") == 700.0


def test_full_power_comes_back_to_a_device_that_was_away() -> None:
    """It fell off the bus before the budget was taken away, and comes back with its cap."""
    plant = equal_pools(1, budget=1050.0)
    plant.run(6.0)
    away = plant.devices.pop(DeviceId("a", "t0"))
    plant.run(1.0)
    plant.governor.set_budget("a", None)
    plant.run(5.0)
    plant.devices[DeviceId("a", "t0")] = away
    plant.run(2.0)
    assert plant.cap("t0") == 700.0


def test_a_limit_of_a_part_of_a_watt_is_full_power() -> None:
    """Then the governor leaves the device alone."""
    plant = equal_pools(1, budget=500.0)
    plant.devices = {key: h100(key.device, cap=350.7, most=350.7) for key in plant.devices}
    plant.run(6.0)
    plant.governor.set_budget("a", None)
    plant.run(8.0)
    assert (plant.cap("p0"), plant.cap("t0")) == (350.7, 350.7)
    somebody = DeviceId("a", "t0")
    plant.devices[somebody] = replace(plant.devices[somebody], cap_watts=250.0)
    plant.run(5.0)
    assert plant.cap("t0") == 250.0


def _two_hosts() -> Plant:
    """Host a with two devices of each role, and host b with four for prompts, within one budget."""
    plant = equal_pools(2)
    plant.hosts.append("b")
    for index in range(4):
        plant.devices[DeviceId("b", f"q{index}")] = h100(f"q{index}")
        plant.uses[DeviceId("b", f"q{index}")] = Use(PROMPT)
    plant.governor.set_budget(None, 3600.0)
    plant.run(8.0)
    return plant


def test_devices_that_the_next_actuator_cannot_read_count_while_workers_use_them() -> None:
    """Their caps may be in force, so the other host gets none of their watts. It does once their workers are gone."""
    plant = _two_hosts()
    plant.down.add("b")
    plant.governor.on_down("b", Peer("b", 1))
    for _ in range(20):
        plant.governor.on_report("b", Peer("b", 2), PowerReport(0, ()), plant.now)
        plant.run(0.25)
    assert plant.caps() <= 3600.0
    plant.uses = {key: use for key, use in plant.uses.items() if key.host == "a"}
    plant.run(8.0)
    assert plant.caps("a") == 4 * 700.0


def test_a_new_governor_waits_for_actuators_of_devices_in_use() -> None:
    """One actuator reports some seconds later than the other. After ten seconds it is taken as not there."""
    plant = _two_hosts()
    plant.take_over(PowerConfig(budget_watts=3600.0))
    plant.down.add("b")
    plant.run(6.0)
    assert plant.caps() <= 3600.0
    plant.run(8.0)
    assert plant.caps("a") == 4 * 700.0


def test_full_power_comes_back_after_a_budget_that_ended_meanwhile() -> None:
    """The budget is taken away while the new governor still waits for the other host's actuator."""
    plant = _two_hosts()
    plant.take_over(PowerConfig(budget_watts=3000.0))
    plant.down.add("b")
    plant.run(4.0)
    assert plant.caps("a") < 4 * 700.0
    plant.governor.set_budget(None, None)
    plant.run(4.0)
    assert plant.caps("a") == 4 * 700.0


def test_a_feed_counts_only_while_it_is_told() -> None:
    """A reading above the budget, from just before the actuator ended, says nothing of the caps that follow."""
    plant = equal_pools(2, budget=2400.0)
    plant.run(6.0)
    plant.feed_watts["a"] = 2450.0
    plant.run(0.25)
    plant.down.add("a")
    plant.governor.on_down("a", Peer("a", 1))
    plant.run(6.0)
    assert plant.governor.notices == []

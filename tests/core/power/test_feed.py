"""A feed that carries more than its budget although the caps are in force lowers the caps, or is said."""

import pytest

from actorserve.core.messages import Peer, PowerReport
from actorserve.core.power.governor import CONTROL_PERIOD_S, DeviceId, PowerConfig, PowerGovernor
from tests.core.power.plant import equal_pools, h100


def test_a_feed_that_no_caps_bring_below_its_budget_is_said_once() -> None:
    """Other things on the feed may draw more than is left at the devices' least power."""
    plant = equal_pools(2, budget=1500.0)
    plant.run(3.0)
    plant.feed_watts["a"] = 1600.0
    plant.run(0.5)
    assert plant.governor.notices == []
    for _ in range(120):
        plant.feed_watts["a"] = 900.0 + plant.caps()
        plant.run(0.5)
    [(host, text)] = plant.governor.notices
    assert host == "a"
    assert text == (
        "the budget of 1500 W cannot be met: 1700 W are drawn although its devices have least power, 800 W together"
    )
    plant.feed_watts["a"] = 800.0
    plant.run(120.0)
    assert plant.caps() == pytest.approx(1500.0, abs=4.0), "caps come back"


def test_a_host_without_devices_that_draws_more_than_its_budget_is_said() -> None:
    """There is nothing to cap."""
    governor = PowerGovernor(PowerConfig(budget_watts_of={"a": 500.0}))
    for step in range(20):
        governor.on_report("a", Peer("a", 1), PowerReport(0, (), 700.0), step / 4)
        governor.round({}, ["a"], step / 4)
    assert [host for host, _ in governor.notices] == ["a"]
    assert "500 W cannot be met: 700 W are drawn" in governor.notices[0][1]


def test_a_feed_over_its_budget_lowers_caps() -> None:
    """If the host draws more than its budget although its caps are in force, they go lower by the excess and a quarter
    of it, once, and come back when the excess is gone.
    """
    plant = equal_pools(budget=4200.0)
    plant.run(3.0)
    for _ in range(20):
        plant.feed_watts["a"] = plant.caps() + 100.0
        plant.run(0.25)
        if plant.now == 3.0 + CONTROL_PERIOD_S:
            assert plant.caps() == pytest.approx(4075.0, abs=8.0)
    assert plant.caps() == pytest.approx(4075.0, abs=8.0)
    plant.feed_watts["a"] = 4195.0
    plant.run(30.0)
    assert plant.caps() == pytest.approx(4075.0, abs=8.0), "there is no room to speak of"
    plant.feed_watts["a"] = 3000.0
    plant.run(30.0)
    assert plant.caps() == pytest.approx(4200.0, abs=4.0)


def test_caps_come_back_from_a_feed_that_asked_for_the_impossible() -> None:
    """If other things on the feed draw so much that all devices have their least power, the caps rise again once that
    has ended, although they were never as low as the feed asked for.
    """
    plant = equal_pools(budget=4200.0)
    plant.run(3.0)
    plant.feed_watts["a"] = 7000.0
    plant.run(60.0)
    assert plant.caps() == 8 * 200.0
    plant.feed_watts["a"] = 2000.0
    plant.run(120.0)
    assert plant.caps() == pytest.approx(4200.0, abs=8.0)


def test_a_hosts_changed_budget_leaves_what_other_feeds_asked_for() -> None:
    """What was learned of one host's feed does not depend on the budget of another one."""
    plant = equal_pools(1, budget=1050.0)
    plant.hosts.append("b")
    plant.devices[DeviceId("b", "q")] = h100("q")
    plant.run(3.0)
    plant.feed_watts["a"] = 1100.0
    plant.run(1.0)
    plant.feed_watts["a"] = 1045.0
    lowered = plant.caps("a")
    assert lowered < 1050.0
    plant.governor.set_budget("b", 500.0)
    plant.run(8.0)
    assert plant.caps("a") == lowered

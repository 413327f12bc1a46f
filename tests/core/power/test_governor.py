"""The governor keeps budgets by caps, lowers before it raises, and believes only what was read back."""

from dataclasses import replace

import pytest

from actorserve.core.messages import Peer, PowerReport, SetPowerCaps
from actorserve.core.power.curves import CURVES
from actorserve.core.power.governor import CONTROL_PERIOD_S, DeviceId, PowerConfig, PowerGovernor, Use
from tests.core.power.plant import MIXED, PROMPT, TOKEN, equal_pools, h100


def test_nothing_is_capped_without_a_budget() -> None:
    """Without a budget no order is sent, whatever the caps are."""
    plant = equal_pools()
    plant.run(5.0)
    assert plant.orders == []


def test_token_instances_pay_first() -> None:
    """At three quarters of the power, token instances have half of theirs and prompt instances all of it."""
    plant = equal_pools(budget=0.75 * 8 * 700)
    plant.run(5.0)
    assert [plant.cap(f"t{index}") for index in range(4)] == [350.0] * 4
    assert [plant.cap(f"p{index}") for index in range(4)] == [700.0] * 4


@pytest.mark.parametrize(
    ("share", "prompt_slowdown", "token_slowdown"),
    [(0.9, 1.0, 1.0), (0.75, 1.0, 1.0), (0.7, 1.08, 1.0), (0.6, 1.23, 1.07), (0.5, 1.42, 1.24), (0.4, 1.69, 1.47)],
)
def test_prompts_are_slowed_before_tokens_pass_their_target(
    share: float, prompt_slowdown: float, token_slowdown: float
) -> None:
    """Prompt instances have full power until token instances are at the knee, and pay alone until prompts take 1.15
    times as long. Then both phases slow down by the same factor. The budget is used up.
    """
    budget = round(share * 8 * 700)
    plant = equal_pools(budget=budget)
    plant.run(5.0)
    prompt, token = (
        CURVES["h100"].prompt.factor(plant.cap("p0") / 700),
        CURVES["h100"].token.factor(plant.cap("t0") / 700),
    )
    assert (prompt, token) == pytest.approx((prompt_slowdown, token_slowdown), abs=0.015)
    assert budget - 8 <= plant.caps() <= budget


def test_mixed_instances_pay_between() -> None:
    """A mixed instance keeps its power until token instances are at the knee, and prompt instances theirs longer."""
    plant = equal_pools(1)
    plant.devices[DeviceId("a", "m")] = h100("m")
    plant.uses[DeviceId("a", "m")] = Use(MIXED)
    for budget, expected in ((1750.0, (700, 700, 350)), (1500.0, (700, 450, 350)), (1200.0, (531, 334, 334))):
        plant.governor.set_budget("a", budget)
        plant.run(12.0)
        assert (plant.cap("p0"), plant.cap("m"), plant.cap("t0")) == expected


def test_an_unused_device_pays_before_all() -> None:
    """A device without an instance gives up its watts first."""
    plant = equal_pools(1, budget=1700.0)
    plant.devices[DeviceId("a", "idle")] = h100("idle")
    plant.run(5.0)
    assert (plant.cap("p0"), plant.cap("t0"), plant.cap("idle")) == (700.0, 700.0, 300.0)


def test_watts_that_token_instances_free_raise_prompt_instances() -> None:
    """A prompt instance below its full power is raised when another instance becomes a token instance."""
    plant = equal_pools(1, budget=1050.0)
    plant.uses = dict.fromkeys(plant.devices, Use(PROMPT))
    plant.run(5.0)
    assert (plant.cap("p0"), plant.cap("t0")) == (525.0, 525.0)
    plant.uses[DeviceId("a", "t0")] = Use(TOKEN)
    plant.run(8.0)
    assert (plant.cap("p0"), plant.cap("t0")) == (700.0, 350.0)


def test_a_raise_waits_until_the_lower_cap_was_read_back() -> None:
    """No device is raised before what pays for it has a lower cap, so the sum never passes the budget on the way."""
    plant = equal_pools(1, budget=1050.0)
    plant.uses = dict.fromkeys(plant.devices, Use(PROMPT))
    plant.run(8.0)
    sums = []
    plant.on_change = lambda: sums.append(plant.caps())
    plant.uses[DeviceId("a", "t0")] = Use(TOKEN)
    plant.run(1.0)
    assert sums == [875.0, 1050.0]
    plant.obeys = lambda key, watts: 700.0 if key.device == "p0" else watts
    plant.uses = {DeviceId("a", "p0"): Use(TOKEN), DeviceId("a", "t0"): Use(PROMPT)}
    plant.run(8.0)
    assert plant.caps() == 1050.0, "p0 is not lowered, so t0 is not raised"


def test_an_order_that_may_be_on_its_way_counts() -> None:
    """A raise that was ordered and taken back counts until an answer shows which of the two orders was carried out."""
    governor = PowerGovernor(PowerConfig(budget_watts=1050.0, hold_s=0.0))
    a, b = DeviceId("a", "x"), DeviceId("b", "y")

    def report(host: str, name: str, cap: float, number: int, now: float) -> None:
        governor.on_report(host, Peer(host, 1), PowerReport(number, (h100(name, cap),)), now)

    def orders(first: Use, second: Use, now: float) -> list[tuple[str, float]]:
        sends = governor.round({a: first, b: second}, ["a", "b"], now)
        return [(send.to.name, watts) for send in sends for watts in send.message.caps_watts]  # type: ignore[union-attr]

    report("a", "x", 350.0, 0, 0.0)
    report("b", "y", 350.0, 0, 0.0)
    assert orders(Use(PROMPT), Use(TOKEN), 9.0) == [("a", 700.0)]
    assert orders(Use(TOKEN), Use(PROMPT), 9.1) == [("a", 350.0)], "700 W may come first"
    report("a", "x", 700.0, 1, 9.2)
    assert orders(Use(TOKEN), Use(PROMPT), 9.2) == []
    report("a", "x", 350.0, 2, 9.3)
    assert orders(Use(TOKEN), Use(PROMPT), 9.3) == [("b", 700.0)]


def test_a_device_that_cannot_be_set_is_made_up_for() -> None:
    """A device whose driver refuses counts at the cap that it has, and the others keep the budget."""
    plant = equal_pools(1, budget=1000.0)
    plant.devices[DeviceId("a", "t0")] = replace(h100("t0"), can_set=False)
    plant.run(5.0)
    assert (plant.cap("p0"), plant.cap("t0")) == (300.0, 700.0)
    assert {key.device for _, key, _ in plant.orders} == {"p0"}


def test_a_device_that_disobeys_is_made_up_for() -> None:
    """A device that takes orders and keeps its cap is found out by reading it back."""
    plant = equal_pools(1, budget=1000.0)
    plant.obeys = lambda key, watts: 700.0 if key.device == "t0" else watts
    plant.run(5.0)
    assert plant.cap("p0") == 300.0


def test_an_order_that_was_lost_is_sent_again() -> None:
    """The governor repeats what was not answered."""
    plant = equal_pools(1, budget=1050.0)
    plant.run(0.25)
    lost = iter([True] * 3)
    plant.delay_s = lambda: None if next(lost, False) else 0.0
    plant.run(3.0)
    assert (plant.cap("p0"), plant.cap("t0")) == (700.0, 350.0)


def test_an_infeasible_budget_is_said_once_with_the_least() -> None:
    """Below the sum of the least limits all devices get those, and operators read it once."""
    plant = equal_pools(2, budget=500.0)
    plant.run(5.0)
    assert plant.caps() == 800.0
    assert plant.governor.notices == [("a", "the budget of 500 W cannot be met: its devices take at least 800 W")]
    plant.run(60.0)
    assert len(plant.governor.notices) == 1


def test_a_changed_budget_is_in_force_within_a_control_period() -> None:
    """From a new budget to caps read back passes at most one control period, downwards and upwards."""
    plant = equal_pools(budget=5600.0)
    plant.run(5.0)
    for budget in (4200.0, 3000.0, 5000.0):
        plant.governor.set_budget("a", budget)
        plant.run(CONTROL_PERIOD_S)
        assert budget - 8 <= plant.caps() <= budget


def test_full_power_comes_back_with_the_last_budget() -> None:
    """When the budget is taken away, all devices get their full power again, even if an order is lost."""
    plant = equal_pools(1, budget=1050.0)
    plant.run(5.0)
    plant.governor.set_budget("a", None)
    lost = iter([True] * 4)
    plant.delay_s = lambda: None if next(lost, False) else 0.0
    plant.run(5.0)
    assert plant.caps() == 1400.0
    plant.orders.clear()
    plant.run(5.0)
    assert plant.orders == []


def test_full_power_comes_back_after_a_driver_that_hung_when_the_budget_was_taken_away() -> None:
    """The governor goes on until it has read the devices at their full power, and then sends nothing."""
    plant = equal_pools(1, budget=1050.0)
    plant.run(5.0)
    for key, power in plant.devices.items():
        plant.devices[key] = replace(power, draw_watts=None, can_set=False)
    plant.run(0.25)
    plant.governor.set_budget("a", None)
    plant.run(5.0)
    for key, power in plant.devices.items():
        plant.devices[key] = replace(power, draw_watts=0.0, can_set=True)
    plant.run(2.0)
    assert plant.caps() == 1400.0
    plant.devices[DeviceId("a", "p0")] = h100("p0", 400.0)
    plant.run(5.0)
    assert plant.cap("p0") == 400.0, "somebody else has set it"


def test_a_driver_that_hangs_at_an_order_is_ordered_again_as_soon_as_it_answers() -> None:
    """It has not done what it was told because it could not, so it does not count as one that does not obey."""
    plant = equal_pools(1, budget=1400.0)
    plant.run(5.0)

    def hang(key: DeviceId, _: float) -> float:
        plant.devices[key] = replace(plant.devices[key], draw_watts=None, can_set=False)
        return plant.cap(key.device)

    plant.obeys = hang
    plant.governor.set_budget("a", 1000.0)
    plant.run(5.0)
    assert plant.caps() == 1400.0
    plant.obeys = lambda _, watts: watts
    for key, power in plant.devices.items():
        plant.devices[key] = replace(power, draw_watts=0.0, can_set=True)
    plant.run(1.0)
    assert plant.caps() <= 1000.0


def test_full_power_comes_back_if_the_budget_is_taken_away_right_after_a_takeover() -> None:
    """The new governor's first order keeps the actuator from lifting the caps, so the governor does it."""
    plant = equal_pools(1, budget=1050.0)
    plant.run(5.0)
    plant.take_over(PowerConfig(budget_watts_of={"a": 1050.0}))
    plant.run(0.5)
    plant.governor.set_budget("a", None)
    plant.run(5.0)
    assert plant.caps() == 1400.0


def test_a_device_that_grants_less_is_not_ordered_again_and_again() -> None:
    """What a device grants counts as the highest that it can have, for some minutes."""
    plant = equal_pools(1, budget=1000.0)
    plant.obeys = lambda key, watts: min(watts, 690.3) if key.device == "p0" else watts
    plant.run(5.0)
    plant.governor.set_budget("a", 1400.0)
    plant.run(10.0)
    assert plant.cap("p0") == 690.3
    plant.orders.clear()
    plant.run(120.0)
    assert plant.orders == []
    plant.devices[DeviceId("a", "p0")] = h100("p0", 500.0)
    plant.obeys = lambda key, watts: min(watts, 688.3) if key.device == "p0" else watts
    plant.run(10.0)
    assert [watts for _, _, watts in plant.orders] == [690.3], "it grants a little less than before"
    plant.orders.clear()
    plant.governor.set_budget("a", None)
    plant.run(10.0)
    assert plant.orders == []


def test_a_cap_that_is_read_back_rounded_is_not_ordered_again() -> None:
    """A driver may round watts."""
    plant = equal_pools(1, budget=1000.0)
    plant.obeys = lambda _, watts: watts - 0.3
    plant.run(5.0)
    plant.governor.set_budget("a", 1500.0)
    plant.run(10.0)
    plant.orders.clear()
    plant.run(10.0)
    assert plant.orders == []


def test_the_cluster_has_a_budget_over_all_hosts() -> None:
    """The cluster's budget lowers token instances on all hosts before it lowers prompt instances on any."""
    plant = equal_pools(1)
    plant.hosts.append("b")
    for name, role in (("q", PROMPT), ("u", TOKEN)):
        plant.devices[DeviceId("b", name)] = h100(name)
        plant.uses[DeviceId("b", name)] = Use(role)
    plant.governor.set_budget(None, 2400.0)
    plant.governor.set_budget("b", 1000.0)
    plant.run(5.0)
    assert (plant.cap("p0"), plant.cap("t0"), plant.cap("q"), plant.cap("u")) == (700.0, 700.0, 650.0, 350.0)
    plant.governor.set_budget(None, 2000.0)
    plant.run(5.0)
    assert (plant.cap("p0"), plant.cap("t0"), plant.cap("q"), plant.cap("u")) == (650.0, 350.0, 650.0, 350.0)


def test_heat_gives_watts_to_others() -> None:
    """A device that heat slows down is capped at what it draws, and the watts raise others, until it has cooled."""
    plant = equal_pools(2, budget=2000.0)
    plant.run(6.0)
    assert plant.cap("p1") == 650.0
    hot = DeviceId("a", "p0")
    plant.devices[hot] = replace(plant.devices[hot], is_throttled=True, draw_watts=500.0)
    plant.run(2.0)
    assert (plant.cap("p0"), plant.cap("p1")) == (500.0, 700.0)
    plant.devices[hot] = replace(plant.devices[hot], is_throttled=False)
    plant.run(30.0)
    assert (plant.cap("p0"), plant.cap("p1")) == (650.0, 650.0)


def test_noise_in_the_draw_of_a_hot_device_does_not_lower_its_cap_more_and_more() -> None:
    """A device that heat slows down keeps about what it drew at first, although it never draws more than its cap."""
    plant = equal_pools(2, budget=2000.0)
    plant.run(6.0)
    hot = DeviceId("a", "p0")
    plant.devices[hot] = replace(plant.devices[hot], is_throttled=True, draw_watts=500.0)
    for second in range(20):
        draw = (plant.cap("p0") if second else 500.0) * (0.97 if second % 2 else 0.99)
        plant.devices[hot] = replace(plant.devices[hot], draw_watts=draw)
        plant.run(1.0)
    assert plant.cap("p0") == 495.0


def test_one_low_reading_of_a_hot_device_does_not_become_its_cap() -> None:
    """A prompt may end just when the device is read."""
    plant = equal_pools(2, budget=2000.0)
    hot = DeviceId("a", "p0")
    plant.devices[hot] = replace(plant.devices[hot], draw_watts=600.0)
    plant.run(6.0)
    for draw, is_hot in ((120.0, True), (600.0, True), (600.0, False)):
        plant.devices[hot] = replace(plant.devices[hot], is_throttled=is_hot, draw_watts=draw)
        plant.run(0.5)
        assert plant.cap("p0") >= 600.0


def test_a_limit_of_the_device_itself_gives_watts_to_others() -> None:
    """A device that keeps to a lower limit than the one that was set does not hold watts that it cannot use."""
    plant = equal_pools(2, budget=2000.0)
    key = DeviceId("a", "p0")
    plant.run(1.0)
    plant.devices[key] = replace(plant.devices[key], enforced_watts=450.0)
    plant.run(10.0)
    assert (plant.cap("p0"), plant.cap("p1")) == (450.0, 700.0)
    plant.devices[key] = replace(plant.devices[key], enforced_watts=430.0)
    plant.run(10.0)
    assert plant.cap("p0") == 430.0


def test_a_device_that_fell_off_frees_its_watts() -> None:
    """A device that its host does not list any more counts no longer."""
    plant = equal_pools(2, budget=2000.0)
    plant.run(6.0)
    del plant.devices[DeviceId("a", "p0")]
    plant.run(6.0)
    assert (plant.cap("p1"), plant.cap("t0"), plant.cap("t1")) == (700.0, 650.0, 650.0)


def test_caps_of_a_host_without_its_actuator_still_count() -> None:
    """While a host has workers its caps count towards the cluster's budget, even if its actuator is gone."""
    plant = equal_pools(1)
    plant.hosts.append("b")
    plant.devices[DeviceId("b", "q")] = h100("q")
    plant.uses[DeviceId("b", "q")] = Use(PROMPT)
    plant.governor.set_budget(None, 1500.0)
    plant.run(6.0)
    assert plant.cap("q") == 575.0
    plant.down.add("b")
    plant.governor.on_down("b", Peer("b", 1))
    plant.governor.set_budget(None, 1400.0)
    plant.run(6.0)
    assert (plant.cap("q"), plant.cap("p0"), plant.cap("t0")) == (575.0, 503.0, 321.0)
    del plant.devices[DeviceId("b", "q")], plant.uses[DeviceId("b", "q")]
    plant.hosts.remove("b")
    plant.run(6.0)
    assert plant.caps() == 1400.0


@pytest.mark.parametrize("configured_watts", [4200.0, 5600.0])
def test_a_coordinator_that_takes_over_leaves_caps_as_they_are(configured_watts: float) -> None:
    """What instances do, and the budget that an operator has ordered, may be known a moment after the devices. Until
    then no cap changes, because any change might be wrong.
    """
    plant = equal_pools(budget=4200.0)
    plant.run(6.0)
    uses, plant.uses = plant.uses, {}
    plant.take_over(PowerConfig(budget_watts_of={"a": configured_watts}))
    plant.run(1.0)
    plant.uses = uses
    plant.governor.set_budget("a", 4200.0)
    plant.run(10.0)
    assert plant.changes == []
    plant.governor.set_budget("a", 3500.0)
    plant.run(1.0)
    assert plant.caps() <= 3500.0


def test_a_coordinator_that_takes_over_meets_a_lower_budget_at_once() -> None:
    """Caps beyond the budget do not wait until more is known."""
    plant = equal_pools(budget=4200.0)
    plant.run(6.0)
    plant.take_over(PowerConfig(budget_watts_of={"a": 3500.0}))
    plant.run(CONTROL_PERIOD_S)
    assert plant.caps() <= 3500.0


def test_what_the_driver_does_not_tell_is_not_made_up() -> None:
    """Devices without readings of their draw leave the feed unjudged, and one without a cap is not ordered about."""
    governor = PowerGovernor(PowerConfig(budget_watts=1000.0))
    blind = replace(h100("x"), cap_watts=None, enforced_watts=None, draw_watts=None)
    governor.on_report("a", Peer("a", 1), PowerReport(0, (blind, replace(h100("y"), draw_watts=None))), 0.0)
    [order] = governor.round({}, ["a"], 0.0)
    assert "('y',), caps_watts=(300.0,)" in str(order)


def test_an_actuator_learns_that_it_is_governed_even_if_no_cap_changes() -> None:
    """With a budget every actuator gets a first order, so that it does not lift the caps that are there."""
    governor = PowerGovernor(PowerConfig(budget_watts=1400.0))
    for host in ("a", "b"):
        governor.on_report(host, Peer(host, 1), PowerReport(0, (h100("x", 700.0),)), 0.0)
    sends = governor.round({}, ["a", "b"], 0.0)
    assert [send.message for send in sends] == [SetPowerCaps(1, (), ())] * 2  # type: ignore[union-attr]
    assert governor.round({}, ["a", "b"], 0.25) == []


def told(governor: PowerGovernor, now: float) -> list[object]:
    """The messages of a round without instances."""
    return [send.message for send in governor.round({}, ["a", "b"], now)]  # type: ignore[union-attr]


def test_a_first_order_that_was_lost_is_sent_again() -> None:
    """Otherwise the actuator would lift the caps that are there, because nothing tells it that it is governed."""
    governor = PowerGovernor(PowerConfig(budget_watts=700.0))
    report = PowerReport(0, (h100("x", 600.0),))
    governor.on_report("a", Peer("a", 1), report, 0.0)
    assert told(governor, 0.0) == [SetPowerCaps(1, (), (), 700.0)]
    governor.on_report("a", Peer("a", 1), report, 0.25)
    assert told(governor, 0.25) == [], "the answer may be on its way"
    assert told(governor, 0.5) == [SetPowerCaps(2, (), (), 700.0)]
    governor.on_report("a", Peer("a", 1), replace(report, sequence=2), 0.6)
    assert told(governor, 1.25) == []


def test_an_actuator_is_told_what_its_host_may_take_alone() -> None:
    """No host may take more than the cluster, and one that is alone in it may take all of that."""
    governor = PowerGovernor(PowerConfig(budget_watts=1400.0, budget_watts_of={"a": 2000.0}))
    governor.on_report("a", Peer("a", 1), PowerReport(0, (h100("x"),)), 0.0)
    assert told(governor, 0.0) == [SetPowerCaps(1, (), (), 1400.0)]
    governor.set_budget("a", 900.0)
    assert told(governor, 0.1) == [SetPowerCaps(2, (), (), 900.0)]
    governor.on_report("b", Peer("b", 1), PowerReport(0, (h100("y"),)), 0.2)
    assert told(governor, 0.2) == [SetPowerCaps(1, (), (), None)], "how much of the cluster's budget is not known"


def test_a_limit_of_the_operators_own_is_not_passed() -> None:
    """A device that may have less than its usual power keeps to that, and its tokens keep the same knee."""
    plant = equal_pools(1, budget=1050.0)
    for name in ("p0", "t0"):
        plant.devices[DeviceId("a", name)] = replace(h100(name, 600.0), most_watts=600.0)
    plant.run(5.0)
    assert (plant.cap("p0"), plant.cap("t0")) == (600.0, 450.0)
    plant.governor.set_budget("a", 900.0)
    plant.run(5.0)
    assert (plant.cap("p0"), plant.cap("t0")) == (555.0, 344.0)
    plant.governor.set_budget("a", None)
    plant.run(12.0)
    assert (plant.cap("p0"), plant.cap("t0")) == (600.0, 600.0)


def test_a_device_that_forgot_its_cap_is_corrected_at_once() -> None:
    """The next round is due when a cap is read that is higher than any that was ordered, and not at other readings."""
    governor = PowerGovernor(PowerConfig(budget_watts_of={"a": 350.0}))
    key = DeviceId("a", "x")

    def report(cap: float, number: int, now: float) -> None:
        governor.on_report("a", Peer("a", 1), PowerReport(number, (h100("x", cap),)), now)

    report(700.0, 0, 0.0)
    governor.round({key: Use(TOKEN)}, ["a"], 0.0)
    report(350.0, 1, 0.1)
    assert governor.next_s == 0.25
    report(700.0, 1, 0.2)
    assert governor.next_s == 0.2

"""The power of simulated machines: what they take, what caps do, and the governor in a simulated cluster."""

from typing import Any

import pytest

from actorserve.core.messages import Open, SetPowerCaps
from actorserve.core.power.curves import CURVES
from actorserve.errors import SimulationError
from actorserve.sim.config import parse_run
from actorserve.sim.power.machine_power import PROMPT_SHARES, MachinePower, PowerTable
from actorserve.sim.simulation import Simulation
from tests.sim.profiles import PROFILE
from tests.sim.runs import BASE
from tools.simulation.experiment import merged

A100 = CURVES["a100"]
POWER: dict[str, Any] = {"curves": "a100", "idle_draw": 0.25}
WATTS = 1000.0


def grouped(groups: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    cluster = {key: value for key, value in BASE["cluster"].items() if key not in ("profile", "kv_tokens")}
    cluster |= {"groups": [{"profile": "sums", "kv_tokens": 400, "watts": WATTS, **group} for group in groups]}
    return merged({**BASE, "cluster": {**cluster, "power": POWER}}, changes)


def simulate(values: dict[str, Any]) -> dict[str, Any]:
    config = parse_run(values, "test")
    return Simulation(config, [PROFILE] * len(config.cluster.all_groups)).run().figures()


class CappedSoon(Simulation):
    """A second after a request has come, the machine gets a cap of half its power."""

    def _send_request(self, request: Open) -> None:
        super()._send_request(request)
        self._at(self.now + 1.0, self._set_caps, SetPowerCaps(1, ("worker-0",), (WATTS / 2,)))


def machine(cap: float = 1.0, **table: Any) -> MachinePower:
    return MachinePower(PowerTable(**{**POWER, **table}), WATTS, cap, 0.0, 100.0)


def test_power_follows_what_the_machine_computes() -> None:
    """Short prompts take less than long ones, and tokens what the curves say; a cap bounds all of them."""
    shares = [machine().watts(num_tokens, 1.0) / WATTS for num_tokens in (0, 1, 128, 384, 1024, 9000)]
    half_way = (PROMPT_SHARES[1][1] + PROMPT_SHARES[2][1]) / 2
    assert shares == pytest.approx([A100.token_draw, PROMPT_SHARES[0][1], PROMPT_SHARES[0][1], half_way, 1.0, 1.0])
    assert [machine().watts(num_tokens, 0.5) for num_tokens in (0, 1024)] == [500.0, 500.0]


def test_energy_is_power_over_time() -> None:
    """Two seconds of a long prompt, five of tokens, and three idle."""
    power = machine()
    power.add(1024, 1, 2.0, 2.0, 1.0)
    power.add(0, 50, 5.0, 7.0, 1.0)
    energy = power.end(10.0)
    assert energy.prompt_j == pytest.approx(2.0 * WATTS)
    assert energy.token_j == pytest.approx(5.0 * A100.token_draw * WATTS)
    assert energy.idle_j == pytest.approx(3.0 * 0.25 * WATTS)
    assert energy.figures()["tokens_per_joule"] == pytest.approx(51 / energy.joules)


def test_a_cap_counts_for_the_time_that_it_is_set() -> None:
    """Half of the time at full power and half of it at 0.6 allow 0.8 of full power."""
    power = machine()
    power.set_cap(0.6, 5.0)
    assert power.end(10.0).figures()["cap"] == pytest.approx(0.8)


def test_an_idle_machine_takes_what_each_cap_leaves_it() -> None:
    """Three seconds idle at full power. A prompt goes on at full power when the cap falls below the idle draw, under
    which the rest is idle until the run ends.
    """
    power = machine(idle_draw=0.5)
    power.set_cap(0.25, 4.0)
    power.add(1024, 1, 2.0, 5.0, 1.0)
    power.set_cap(0.3, 60.0)
    energy = power.end(120.0)
    assert energy.prompt_j == pytest.approx(2.0 * WATTS)
    assert energy.idle_j == pytest.approx((3.0 * 0.5 + 55.0 * 0.25 + 40.0 * 0.3) * WATTS)


def test_an_iteration_is_paid_under_the_cap_of_its_time() -> None:
    """The cap falls while a prompt of two seconds runs, which keeps its time and its power. Tokens after it do not."""
    config = parse_run(grouped([{"name": "all", "count": 1}]), "test")
    energy = CappedSoon(config, [PROFILE]).run().energies[config.cluster.all_groups[0]]
    assert energy.prompt_j == pytest.approx(2.0 * PROMPT_SHARES[0][1] * WATTS)
    assert energy.token_j == pytest.approx(1.5 * A100.token.factor(0.5) * 0.5 * WATTS)


def test_assumptions_replace_the_curves() -> None:
    """The draw of tokens, and how much longer both phases take at half power, are what a sweep varies."""
    swept = machine(0.5, curves="h100", token_draw=0.9, slowdown_at_half=1.3)
    assert swept.decode_factor == pytest.approx(1.3)
    assert machine(curves="h100", token_draw=0.9).watts(0, 1.0) == pytest.approx(900.0)
    slower = machine(0.5, curves="h100", prompt_slowdown_at_half=1.3)
    assert slower.prefill_factor == pytest.approx(1.3)
    assert slower.decode_factor == machine(0.5, curves="h100").decode_factor


def test_a_capped_machine_takes_longer_and_less() -> None:
    """At 0.4 of full power both phases take as much longer as the curves say, and the power keeps to the cap."""
    free, capped = (simulate(grouped([{"name": "all", "count": 1, "cap": cap}])) for cap in (1.0, 0.4))
    prompts_s, tokens_s = 2.0, 1.5
    more_s = prompts_s * (A100.prompt.factor(0.4) - 1) + tokens_s * (A100.token.factor(0.4) - 1)
    assert capped["latency"]["e2e_s"]["mean"] - free["latency"]["e2e_s"]["mean"] == pytest.approx(more_s, abs=1e-6)
    assert capped["energy"]["power"] < 0.4
    assert free["energy"]["power"] > 0.5


def test_without_curves_there_are_no_figures_of_energy() -> None:
    values = grouped([{"name": "all", "count": 1}])
    del values["cluster"]["power"]
    assert simulate(values)["energy"] is None


def test_the_governor_caps_token_machines_first() -> None:
    """With a budget that token machines can meet alone, prompt machines keep full power but for the first moments, in
    which no machine has a role yet.
    """
    groups = [{"name": "p", "count": 1, "role": "prompt"}, {"name": "t", "count": 1, "role": "token"}]
    changes: dict[str, Any] = {"tpot_target_s": 1.0, "power": {**POWER, "budget": 0.85}}
    figures = simulate(grouped(groups, cluster=changes, num_requests=30, duration_s=60.0))
    caps = {name: found["cap"] for name, found in figures["energy"]["groups"].items()}
    assert caps["p"] > 0.97
    assert 0.69 < caps["t"] < 0.72
    assert figures["requests"]["completed"] == 30


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"power": {"budget": 0.5}}, "cluster.power.curves is missing: expected h100 or a100"),
        ({"power": {"curves": "b200"}}, "cluster.power.curves is 'b200': expected 'h100' or 'a100'"),
        ({"power": {"curves": "a100", "budget": 1.5}}, "cluster.power.budget is 1.5: expected at most 1"),
        ({"groups": [{"name": "x", "count": 1, "profile": "sums", "kv_tokens": 40}]}, "cluster.groups.0.watts is miss"),
    ],
)
def test_wrong_power_is_named(changes: dict[str, Any], told: str) -> None:
    """An error names the key, and what was expected."""
    values = grouped([{"name": "all", "count": 1}])
    values["cluster"] |= changes
    with pytest.raises(SimulationError) as caught:
        parse_run(values, "test")
    assert str(caught.value).startswith(f"test: {told}")


def test_a_cap_needs_curves() -> None:
    values = grouped([{"name": "all", "count": 1, "cap": 0.5}])
    del values["cluster"]["power"]
    with pytest.raises(SimulationError, match=r"cluster\.groups\.0\.cap is 0\.5: expected only with power\.curves"):
        parse_run(values, "test")

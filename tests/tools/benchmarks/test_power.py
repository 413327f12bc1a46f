"""tools/bench power: the closed loop keeps budgets in time, and beats even caps."""

from pathlib import Path

import pytest

from actorserve.core.power.governor import CONTROL_PERIOD_S
from tests.tools.benchmarks.run_bench import run_bench
from tools.benchmarks.power.power import GAIN_TITLE, LOOP_TITLE, correction, rate
from tools.figures.files import read_figures

NAMES = (
    "the budget falls from 90 to 75 %",
    "all GPUs forget their caps, 75 %",
    "a token instance becomes a prompt instance, 75 %",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_a_host_is_never_over_its_budget_for_longer_than_a_control_period(name: str, seed: int) -> None:
    """Whatever happens, the caps keep the budget again within one control period, and so does the power."""
    found = correction(name, seed)
    assert found.caps_s <= CONTROL_PERIOD_S
    assert found.longest_s <= CONTROL_PERIOD_S


def test_power_beyond_caps_is_corrected_within_a_control_period() -> None:
    """When GPUs draw more than their caps, the host passes its budget, and not for longer than a control period."""
    found = correction("all GPUs begin to draw 5 % more than they should, 75 %", 1)
    assert found.most_share > 0.02
    assert 0.1 < found.longest_s <= CONTROL_PERIOD_S


def test_the_governor_beats_even_caps_at_three_quarters() -> None:
    """With equal pools of H100 at 75 % of the power, prompts run at full power, and even caps slow them by a fifth."""
    governed, even = (rate(0.75, (4, 4), "h100", 1, is_even=is_even) for is_even in (False, True))
    assert governed == pytest.approx(1.0, abs=0.03)
    assert governed / even > 1.1


def test_the_figures_are_saved(tmp_path: Path) -> None:
    """The command writes both tables."""
    file = tmp_path / "figures.json"
    done = run_bench("power", "--rounds", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert [table.title for table in read_figures(file).tables] == [LOOP_TITLE, GAIN_TITLE]

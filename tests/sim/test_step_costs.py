"""What an iteration costs by SplitwiseSim's rules, each chosen by itself."""

from dataclasses import replace

import pytest

from actorserve.core.timing.profile import Curve
from actorserve.profile_files import load_profile
from actorserve.sim.step_costs import CostsTable, step_costs
from tests.sim.profiles import PROFILE
from tests.sim.runs import run
from tools.simulation.experiment import PROFILES

BLOOM = load_profile(PROFILES / "bloom-176b-h100.toml")
TALKATIVE = replace(PROFILE, decode=Curve((1.0, 8.0), (0.5, 4.0)))
"""Eight decodes take eight times as long as one."""
PROMPTS = [(400, 0), (112, 0)]


def test_the_profile_costs_unless_a_rule_is_chosen() -> None:
    """Without a choice there is nothing between the engine and its profile."""
    assert step_costs(BLOOM, CostsTable()) is BLOOM


def test_decodes_are_looked_up_by_their_number() -> None:
    """64 requests cost what one request with 64 tokens of context costs, whatever their own context is. Published
    tables have 35.5 ms there for BLOOM-176B on H100s, and 63.8 ms were measured for 64 requests.
    """
    costs = step_costs(BLOOM, CostsTable(decode="splitwise_sim"))
    assert costs.step_s([], 64, 64 * 1000) == BLOOM.decode_s(1, 64) == pytest.approx(0.0355, rel=0.02)
    assert costs.step_s([], 64, 64 * 512) == costs.step_s([], 64, 64)
    assert costs.step_s(PROMPTS, 3, 100) == BLOOM.step_s(PROMPTS, 3, 100)


def test_prompts_cost_one_prompt_of_all_tokens() -> None:
    """An iteration with prompts costs its tokens as one prompt, and 1.1 times that if decodes share it."""
    costs = step_costs(BLOOM, CostsTable(prefill="splitwise_sim"))
    assert costs.step_s(PROMPTS, 0, 0) == BLOOM.prefill_s(512)
    assert costs.step_s(PROMPTS, 88, 9000) == 1.1 * BLOOM.prefill_s(600)
    assert costs.step_s([], 64, 9000) == BLOOM.step_s([], 64, 9000)


def test_an_engine_takes_the_chosen_costs() -> None:
    """In a run, decodes that are looked up by their number take the time of one."""
    changes = {"num_requests": 8, "arrivals": {"rate_per_s": 100.0}, "lengths": {"output": 40}}
    times = []
    for rule in ("profile", "splitwise_sim"):
        results = run({**changes, "cluster": {"costs": {"decode": rule}}}, TALKATIVE)
        times.append(max(results.outcomes.ended_s))
    assert times[1] < 0.6 * times[0]

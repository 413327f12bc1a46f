"""What an iteration costs by SplitwiseSim's rules, each chosen by itself."""

from dataclasses import replace
from typing import Any

import pytest

from actorserve.core.timing.profile import Curve
from actorserve.errors import SimulationError
from actorserve.profile_files import load_profile
from actorserve.sim.step_costs import CostsTable, StepCosts, step_costs
from tests.sim.profiles import PROFILE
from tests.sim.runs import config, run
from tools.simulation.machines import PROFILES

BLOOM = load_profile(PROFILES / "bloom-176b-h100.toml")
TALKATIVE = replace(PROFILE, decode=Curve((1.0, 8.0), (0.5, 4.0)))
"""Eight decodes take eight times as long as one."""
PROMPTS = [(400, 0), (112, 0)]


LOOKUP: dict[str, Any] = {
    "profile": "bloom",
    "tokens": [128, 256, 512],
    "prefill_s": [0.05, 0.06, 0.1],
    "decode_s": [0.036, 0.0365, 0.037],
}
SUMS = {**LOOKUP, "profile": "sums"}


def costs(**rules: str) -> StepCosts:
    return step_costs(BLOOM, "bloom", CostsTable.model_validate({"lookups": [LOOKUP], **rules}))


def test_the_profile_costs_unless_a_rule_is_chosen() -> None:
    """Without a choice there is nothing between the engine and its profile, whether there are tables or not."""
    assert costs() is BLOOM
    assert step_costs(BLOOM, "bloom", CostsTable()) is BLOOM


def test_decodes_are_looked_up_by_their_number() -> None:
    """64 requests cost what the table has for one request with 64 tokens of context, whatever their own context is."""
    looked_up = costs(decode="splitwise_sim")
    assert looked_up.step_s([], 64, 64 * 1000) == pytest.approx(0.03575)  # the first line goes on below 128 tokens
    assert looked_up.step_s([], 64, 64 * 512) == looked_up.step_s([], 64, 64)
    assert looked_up.step_s([], 192, 0) == pytest.approx(0.03625)
    assert looked_up.step_s(PROMPTS, 3, 100) == BLOOM.step_s(PROMPTS, 3, 100)


def test_prompts_cost_one_prompt_of_all_tokens() -> None:
    """An iteration with prompts costs its tokens as one prompt, and 1.1 times that if decodes share it."""
    looked_up = costs(prefill="splitwise_sim")
    assert looked_up.step_s(PROMPTS, 0, 0) == pytest.approx(0.1)
    assert looked_up.step_s([(300, 0)], 84, 9000) == pytest.approx(1.1 * 0.08)
    assert looked_up.step_s([(768, 0)], 0, 0) == pytest.approx(0.14)  # the last line goes on
    assert looked_up.step_s([(64, 0)], 0, 0) == pytest.approx(0.045)
    assert looked_up.step_s([], 64, 9000) == BLOOM.step_s([], 64, 9000)


def test_an_engine_takes_the_chosen_costs() -> None:
    """In a run, decodes that are looked up by their number take the time of one."""
    changes = {"num_requests": 8, "arrivals": {"rate_per_s": 100.0}, "lengths": {"output": 40}}
    lookup = {**SUMS, "decode_s": [0.5, 0.5, 0.5]}
    times = []
    for rule in ("profile", "splitwise_sim"):
        results = run({**changes, "cluster": {"costs": {"decode": rule, "lookups": [lookup]}}}, TALKATIVE)
        times.append(max(results.outcomes.ended_s))
    assert times[1] < 0.6 * times[0]


@pytest.mark.parametrize(
    ("lookups", "told"),
    [
        ([], "lookups has no table for the profile of group 0, 'sums': expected one"),
        ([LOOKUP], "lookups has no table for the profile of group 0, 'sums': expected one"),
        ([{**SUMS, "tokens": [1]}], "lookups.0.prefill_s makes no line of times: expected a time for each"),
        ([{**SUMS, "tokens": [128, 128, 512]}], "lookups.0.prefill_s makes no line of times: expected a time for each"),
        ([{**SUMS, "prefill_s": [0.05, 0.06]}], "lookups.0.prefill_s makes no line of times: expected a time for each"),
        (
            [{**SUMS, "decode_s": [0.1, 0.3, 0.4]}],
            "lookups.0.decode_s makes no line of times: expected a time for each",
        ),
        (
            [{**SUMS, "decode_s": [0.3, 0.2, 0.4]}],
            "lookups.0.decode_s makes no line of times: expected a time for each",
        ),
        ([{**SUMS, "swap_s": 1.0}], "lookups.0.swap_s is unknown: expected decode_s, prefill_s, profile, tokens"),
    ],
)
def test_wrong_lookups_are_named(lookups: list[dict[str, Any]], told: str) -> None:
    """A rule without its table, and a table that makes no line, are errors that say what was expected."""
    with pytest.raises(SimulationError) as caught:
        config({"cluster": {"costs": {"decode": "splitwise_sim", "lookups": lookups}}})
    assert str(caught.value).startswith(f"test: cluster.costs.{told}")

"""The measured profile of an engine with a known cost equals that cost."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from actorserve.profile_files import BYTES_PER_S_BOUNDS, parse_profile, profile_text
from tests.workers.profile.cost_engine import CostEngine
from workers.engine import Engine
from workers.profile.engine_timer import EngineTimer, Shape, fit_link, loopback_link, memory_link
from workers.profile.fit import Facts, make_profile, measured_shapes
from workers.profile.measure import QUICK, THOROUGH, Effort, measure
from workers.profile.plans import Plan, quick_plan, thorough_plan

FACTS = Facts("int8", "a test", 2)
ROUNDS = Effort(least_rounds=3, most_rounds=3, budget_s=0.0, slow_s=1e9)


def silent(share: float, what: str) -> None:
    """Ignore the progress."""


@pytest.mark.parametrize("make_plan", [quick_plan, thorough_plan])
@pytest.mark.parametrize("num_host_blocks", [0, 8])
def test_a_known_cost_is_found(make_plan: Callable[[Engine, int, int], Plan], num_host_blocks: int) -> None:
    """The profile predicts the engine's prefills, decodes and mixed iterations, and survives writing to a file."""
    engine = CostEngine(num_host_blocks=num_host_blocks)
    found = measure(engine, make_plan(engine, 512, 64), ROUNDS, silent)
    profile = make_profile("a name", "cost", FACTS, 100, found)
    assert profile.prefill_s(512) == pytest.approx(0.005 + 0.0004 * 512 + 0.5e-6 * 512**2, rel=0.01)
    assert profile.prefill_s(300) == pytest.approx(0.005 + 0.0004 * 300 + 0.5e-6 * 300**2, rel=0.08)
    more_s = profile.prefill_s(256, 1000) - profile.prefill_s(256)
    assert more_s == pytest.approx(1e-6 * 256 * 1000, rel=0.02)
    assert profile.decode_s(10, 4000) == pytest.approx(0.005 + 0.0004 * 10 + 1e-6 * 4000, rel=0.02)
    assert profile.step_s([(128, 0)], 8, 2000) == pytest.approx(
        0.005 + 0.0004 * 136 + 0.5e-6 * 128**2 + 1e-6 * 2000, rel=0.1
    )
    assert profile.weights_s == pytest.approx(0.005, rel=0.01)
    assert profile.decode_mixed_s == pytest.approx(0.0, abs=3e-5)
    assert parse_profile(profile_text(profile, measured_shapes(found)), "x") == profile
    assert engine.requests == set()
    assert dict(profile.errors).get("mixed_max", 0.0) < 0.1
    assert ("mixed_max" in dict(profile.errors)) == (make_plan is thorough_plan)
    assert dict(profile.errors)["drift"] == 0.0


@pytest.mark.parametrize("make_plan", [quick_plan, thorough_plan])
def test_what_a_decode_costs_in_addition_to_a_prefills_token_is_found(
    make_plan: Callable[[Engine, int, int], Plan],
) -> None:
    """Mixed iterations are measured, and tell how much longer a decode takes than a prefill's token."""
    engine = CostEngine()
    engine.decode_s = 0.001
    profile = make_profile("a name", "cost", FACTS, 100, measure(engine, make_plan(engine, 512, 64), ROUNDS, silent))
    assert profile.decode_mixed_s == pytest.approx(0.001, rel=0.2)
    assert profile.step_s([(64, 0)], 8, 1024) == pytest.approx(
        0.005 + 0.0004 * 72 + 0.5e-6 * 64**2 + 1e-6 * 1024 + 0.008, rel=0.05
    )


def test_a_machine_that_slows_down_changes_no_relation_between_shapes() -> None:
    """If the machine is half as fast for some time, all shapes have its usual speed's level, and the drift is told."""
    engine, steady = CostEngine(), CostEngine()
    engine.slowness = lambda number: 2.0 if 150 < number < 240 else 1.0
    plan, rounds = quick_plan(engine, 512, 64), replace(ROUNDS, least_rounds=7, most_rounds=7)
    found = measure(engine, plan, rounds, silent)
    expected = measure(steady, plan, rounds, silent)
    assert len(engine.plans) > 270
    for shape, timing in found.fitted.items():
        assert timing.seconds == pytest.approx(expected.fitted[shape].seconds, rel=0.01), shape
    assert found.drift == pytest.approx(1.0)
    assert dict(make_profile("a name", "cost", FACTS, 100, found).errors)["drift"] == 1.0
    assert expected.drift == 0.0


def test_a_shapes_spread_is_told() -> None:
    """The spread is half the distance between the quartiles, relative to the median, and it is kept in the file."""
    engine = CostEngine()
    plan = quick_plan(engine, 512, 64)
    engine.slowness = lambda number: 1.0 if len(engine.plans[-1].starts) == 4 else (1.0, 1.2, 1.4)[number % 3]
    found = measure(engine, plan, replace(ROUNDS, least_rounds=9, most_rounds=9), silent)
    spreads = [shape.spread for shape in measured_shapes(found) if shape.requests != plan.anchor.num_requests]
    assert max(spreads) == pytest.approx(0.2 / 1.2, rel=0.3)
    assert found.fitted[plan.anchor].spread == 0.0
    assert found.drift == 0.0


def test_outliers_do_not_count() -> None:
    """If every fifth iteration takes fifty times as long, the profile is that of the other iterations."""
    engine = CostEngine()
    engine.disturbs = True
    found = measure(engine, quick_plan(engine, 512, 16), replace(ROUNDS, least_rounds=9, most_rounds=9), silent)
    profile = make_profile("a name", "cost", FACTS, 100, found)
    assert profile.prefill_s(512) == pytest.approx(0.005 + 0.0004 * 512 + 0.5e-6 * 512**2, rel=0.01)
    assert profile.decode_s(16, 1000) == pytest.approx(0.005 + 0.0004 * 16 + 1e-6 * 1000, rel=0.02)


def test_slow_shapes_are_left_out() -> None:
    """On a slow machine long prompts are measured at most once, and the profile extrapolates to them."""
    engine = CostEngine()
    plan = thorough_plan(engine, 2048, 64)
    found = measure(engine, plan, replace(ROUNDS, slow_s=0.2), silent)
    longest = max(shape.num_tokens for shape in found.fitted)
    assert longest < max(shape.num_tokens for shape in plan.fitted)
    assert sum(len(tokens) > longest for step in engine.plans for tokens in step.token_ids) <= 1
    assert make_profile("a name", "cost", FACTS, 100, found).prefill_s(2048) > 1.0


@pytest.mark.parametrize("effort", [QUICK, THOROUGH])
@pytest.mark.parametrize(
    ("num_blocks", "num_host_blocks", "max_tokens"), [(1, 0, 2), (2, 1, 32), (8, 3, 100), (300, 1, 4096)]
)
def test_small_engines_are_measured_as_far_as_they_go(
    effort: Effort, num_blocks: int, num_host_blocks: int, max_tokens: int
) -> None:
    """If the pool is smaller than the plan's shapes, requests share blocks, and the profile is still valid."""
    engine = CostEngine(num_blocks, num_host_blocks, max_tokens)
    for make_plan in (quick_plan, thorough_plan):
        found = measure(engine, make_plan(engine, 512, 64), replace(effort, most_rounds=2), silent)
        profile = make_profile("a name", "cost", FACTS, 100, found)
        assert parse_profile(profile_text(profile), "x") == profile


def test_requests_read_different_contexts() -> None:
    """As far as the pool goes, no two requests of a batch read the same blocks, so that caches do not speed them up."""
    engine = CostEngine()
    with EngineTimer(engine, [Shape(0, 0, 8, 256)]) as timer:
        timer.iteration_s(Shape(0, 0, 8, 256))
    tables = engine.plans[-1].block_tables
    assert len({block for table in tables for block in table}) == 8 * 17


def test_progress_grows_to_the_end() -> None:
    """Progress goes from 0 to 1, never far back, and names the current work."""
    shares: list[float] = []
    engine = CostEngine()
    measure(engine, quick_plan(engine, 512, 16), ROUNDS, lambda share, what: shares.append(share) if what else None)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert shares == sorted(shares)


def test_links_are_measured() -> None:
    """Links have plausible rates, between a megabyte and many terabytes a second."""
    for link in (memory_link(), loopback_link()):
        assert 1e6 < link.bytes_per_s < 1e14
        assert 0.0 <= link.latency_s < 1.0


def test_a_links_rate_stays_within_a_profiles_bounds() -> None:
    """Copies whose times hardly grow with their size make a fast link, not an absurd one."""
    link = fit_link(lambda amount: 1e-6 + 1e-18 * amount, 1, 64, 1 << 20)
    assert link.bytes_per_s == BYTES_PER_S_BOUNDS[1]
    assert link.latency_s == pytest.approx(1e-6, rel=0.01)

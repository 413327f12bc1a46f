"""Online correction: measured iterations and copies correct a wrong profile."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from actorserve.core.timing.profile import Curve, Profile
from actorserve.core.timing.step_times import Iteration, StepTimes
from tests.core.harness.profiles import PROFILE


def slower(factor: float) -> Profile:
    def scaled(curve: Curve) -> Curve:
        return Curve(curve.xs, tuple(factor * y for y in curve.ys))

    return replace(
        PROFILE,
        prefill=scaled(PROFILE.prefill),
        prefill_context_s=factor * PROFILE.prefill_context_s,
        decode=scaled(PROFILE.decode),
        decode_context=scaled(PROFILE.decode_context),
    )


def test_times_begin_as_the_profiles() -> None:
    """Before anything was measured, every time is the profile's own."""
    times = StepTimes(PROFILE)
    assert times.min_iteration_s == pytest.approx(PROFILE.min_iteration_s)
    assert times.prefill_s(300, 500) == pytest.approx(PROFILE.prefill_s(300, 500))
    assert times.decode_s(7, 900) == pytest.approx(PROFILE.decode_s(7, 900))
    assert times.swap_s(5000) == PROFILE.swap.copy_s(5000)
    assert times.prefill_s(0, 10) == times.decode_s(0, 0) == times.swap_s(0) == 0.0


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 4000)), max_size=4), st.integers(0, 64), st.integers(0, 9000)
)
def test_iterations_are_the_profiles(chunks: list[tuple[int, int]], decodes: int, contexts: int) -> None:
    """Uncorrected, chunks and decodes together take what the profile says, however they are mixed."""
    if chunks or decodes:
        step_s = StepTimes(PROFILE).step_s(Iteration(PROFILE, decodes, contexts, chunks))
        assert step_s == pytest.approx(PROFILE.step_s(chunks, decodes, contexts))


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0, 10.0])
def test_a_wrong_profile_is_corrected(factor: float) -> None:
    """After a few tens of mixed iterations the times of decodes and prefills are right, alone and together."""
    truth = slower(factor)
    times = StepTimes(PROFILE)
    kinds = [([(512, 0)], 0, 0), ([], 8, 4000), ([(300, 700)], 8, 4100), ([], 60, 30_000)]
    for number in range(60):
        chunks, decodes, contexts = kinds[number % len(kinds)]
        times.observe(Iteration(PROFILE, decodes, contexts, chunks), truth.step_s(chunks, decodes, contexts))
    for chunks, decodes, contexts in kinds:
        right_s = truth.step_s(chunks, decodes, contexts)
        assert times.step_s(Iteration(PROFILE, decodes, contexts, chunks)) == pytest.approx(right_s, rel=0.15)
    assert times.prefill_s(512) == pytest.approx(truth.prefill_s(512), rel=0.15)
    assert times.decode_s(8, 4000) == pytest.approx(truth.decode_s(8, 4000), rel=0.15)


def test_prefills_alone_say_little_of_decodes() -> None:
    """If only prefills are slow, the times of decodes change only by the part that both have in common."""
    times = StepTimes(PROFILE)
    for _ in range(40):
        times.observe(Iteration(PROFILE, 0, 0, [(1000, 0)]), 3 * PROFILE.prefill_s(1000))
    assert times.prefill_s(1000) == pytest.approx(3 * PROFILE.prefill_s(1000), rel=0.02)
    assert times.decode_s(8, 4000) < 1.2 * PROFILE.decode_s(8, 4000)


def test_an_outlier_counts_for_little() -> None:
    """One iteration of a hundred times its duration changes times by less than a half."""
    times = StepTimes(PROFILE)
    times.observe(Iteration(PROFILE, 8, 4000), 100 * PROFILE.decode_s(8, 4000))
    assert PROFILE.decode_s(8, 4000) < times.decode_s(8, 4000) < 1.5 * PROFILE.decode_s(8, 4000)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, math.nan, math.inf])
def test_impossible_durations_are_ignored(duration_s: float) -> None:
    """Durations that are zero, negative or not finite change nothing."""
    times = StepTimes(PROFILE)
    times.observe(Iteration(PROFILE, 8, 4000), duration_s)
    times.observe_swap(1000, duration_s)
    assert times.decode_s(8, 4000) == pytest.approx(PROFILE.decode_s(8, 4000))
    assert times.swap_s(1000) == PROFILE.swap.copy_s(1000)


def test_copies_are_corrected() -> None:
    """Copies slower than the profile soon change the times of copies, and not those of iterations."""
    times = StepTimes(PROFILE)
    for _ in range(20):
        times.observe_swap(50_000, 4 * PROFILE.swap.copy_s(50_000))
    assert times.swap_s(50_000) == pytest.approx(4 * PROFILE.swap.copy_s(50_000), rel=0.05)
    assert times.decode_s(8, 0) == pytest.approx(PROFILE.decode_s(8, 0))


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 10**6), st.integers(0, 5000), st.floats()), max_size=60))
def test_times_stay_positive_and_finite(steps: list[tuple[int, int, int, float]]) -> None:
    """Whatever is measured, all times stay positive and finite."""
    times = StepTimes(PROFILE)
    for decodes, contexts, tokens, duration_s in steps:
        times.observe(Iteration(PROFILE, decodes, contexts, [(tokens, contexts)] if tokens else []), duration_s)
        times.observe_swap(tokens, duration_s)
    for time_s in (times.prefill_s(100, 100), times.decode_s(8, 100), times.min_iteration_s, times.swap_s(10**6)):
        assert 0.0 < time_s < 1e7


def test_fitting_tokens_fill_a_limit() -> None:
    """With the tokens that fit an iteration takes no longer than the limit, and with one more it takes longer, even
    with corrected times.
    """
    times = StepTimes(PROFILE)
    for _ in range(5):
        times.observe(Iteration(PROFILE, 8, 4000, [(500, 2000)]), 0.2)
    iteration = Iteration(PROFILE, 8, 4000, [(100, 0)])
    limit_s = times.step_s(iteration) + 0.05
    for context in (0, 3000):
        num_tokens = times.num_fitting_tokens(iteration, context, limit_s, 10**6)
        assert 100 < num_tokens < 10**6
        assert times.step_s(iteration.with_chunk(num_tokens, context)) <= limit_s
        assert times.step_s(iteration.with_chunk(num_tokens + 1, context)) > limit_s
        assert times.num_fitting_tokens(iteration, context, limit_s, 50) == 50
    assert times.num_fitting_tokens(iteration, 0, 0.0, 50) == 0

"""The rules that the times of iterations keep, whatever a profile's numbers and their corrections are."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from actorserve.core.scheduling.token_budget import MIN_PREFILL_TOKENS, TokenBudget
from actorserve.core.timing.profile import Curve, Profile
from actorserve.core.timing.step_times import Iteration, StepTimes
from actorserve.profile_files import load_profile
from tests.core.harness.profiles import PROFILE

SHIPPED = {file.stem: load_profile(file) for file in (Path(__file__).parents[3] / "config" / "profiles").glob("*.toml")}
H100 = SHIPPED["llama-2-70b-h100"]

Chunks = list[tuple[int, int]]


@st.composite
def curves(draw: st.DrawFn, least_x: int, least_y: float) -> Curve:
    """A curve that never falls, with flat, steep and bent pieces."""
    xs, ys = [float(least_x)], [draw(st.floats(least_y, 0.1))]
    for _ in range(draw(st.integers(1, 8))):
        xs.append(xs[-1] + draw(st.integers(1, 4000)))
        ys.append(ys[-1] + draw(st.sampled_from([0.0, 1e-3, 0.05]) | st.floats(0.0, 1.0)))
    return Curve(tuple(xs), tuple(ys))


@st.composite
def random_profiles(draw: st.DrawFn) -> Profile:
    prefill, decode = draw(curves(1, 1e-3)), draw(curves(1, 1e-3))
    return replace(
        PROFILE,
        prefill=prefill,
        prefill_context_s=draw(st.sampled_from([0.0, 1e-9, 1e-7, 1e-5])),
        weights_s=draw(st.floats(0.0, 1.0)) * min(prefill.ys[0], decode.ys[0]),
        decode=decode,
        decode_context=draw(curves(0, 0.0)),
        decode_mixed_s=draw(st.sampled_from([0.0, 1e-4])),
    )


profiles = st.sampled_from(list(SHIPPED.values())) | random_profiles()
chunks = st.lists(st.tuples(st.integers(1, 6000), st.just(0) | st.integers(0, 20_000)), min_size=1, max_size=4)
decodes = st.integers(0, 200)
contexts = st.integers(0, 100_000)
seeds = st.none() | st.integers(0, 1000)
SLACK = 1.0 - 1e-9  # of rounding


class Times:
    """The times of a profile; with a seed, after measurements that corrected its parts in all directions."""

    def __init__(self, profile: Profile, seed: int | None) -> None:
        self.profile = profile
        self.times = StepTimes(profile)
        if seed is None:
            return
        rng = random.Random(seed)
        for _ in range(30):
            iteration = self.iteration(
                [(rng.randint(1, 4000), rng.choice([0, 3000])) for _ in range(rng.randint(0, 2))],
                rng.randint(1, 64),
                rng.randint(0, 50_000),
            )
            self.times.observe(iteration, self.times.step_s(iteration) * rng.choice([0.3, 0.8, 1.5, 4.0]))

    def iteration(self, parts: Chunks, num_decodes: int, num_context_tokens: int) -> Iteration:
        return Iteration(self.profile, num_decodes, num_context_tokens if num_decodes else 0, parts)

    def step_s(self, parts: Chunks, num_decodes: int = 0, num_context_tokens: int = 0) -> float:
        return self.times.step_s(self.iteration(parts, num_decodes, num_context_tokens))


@given(profiles, seeds, chunks, decodes, contexts)
def test_sharing_an_iteration_saves_no_part_of_it(
    profile: Profile, seed: int | None, parts: Chunks, num_decodes: int, num_context_tokens: int
) -> None:
    """An iteration takes no less than its prefills alone, its decodes alone, or any one of its chunks alone."""
    times = Times(profile, seed)
    together_s = times.step_s(parts, num_decodes, num_context_tokens)
    assert together_s >= SLACK * times.step_s(parts)
    if num_decodes:
        assert together_s >= SLACK * times.times.decode_s(num_decodes, num_context_tokens)
    for tokens, before in parts:
        assert together_s >= SLACK * times.times.prefill_s(tokens, before)


@given(profiles, st.integers(1, 6000), decodes, contexts)
def test_a_mixed_iteration_fills_like_one_prompt(
    profile: Profile, num_tokens: int, num_decodes: int, num_context_tokens: int
) -> None:
    """A prompt beside decodes takes no less than a prompt of all tokens, with the attention of the decodes."""
    attention_s = profile.decode_context(num_context_tokens) if num_decodes else 0.0
    least_s = profile.prefill(num_tokens + num_decodes) + attention_s
    assert profile.step_s([(num_tokens, 0)], num_decodes, num_context_tokens) >= SLACK * least_s


@given(profiles, st.lists(st.integers(1, 4000), min_size=2, max_size=8))
def test_a_prompt_in_chunks_takes_no_less_than_whole(profile: Profile, lengths: list[int]) -> None:
    """Iterations for the chunks of a prompt together take as long as one for the whole prompt, and in addition the
    weights are read for each further chunk.
    """
    in_chunks_s = sum(profile.prefill_s(tokens, sum(lengths[:place])) for place, tokens in enumerate(lengths))
    whole_s = profile.prefill_s(sum(lengths)) + (len(lengths) - 1) * profile.weights_s
    assert in_chunks_s >= SLACK * whole_s


@given(profiles, st.integers(1, 4000), st.integers(1, 20_000))
def test_a_chunk_attends_to_what_came_before(profile: Profile, num_tokens: int, num_before: int) -> None:
    """A chunk takes as long as a prompt of its length, and attends to the tokens before it no faster than measured."""
    extra_s = profile.prefill_s(num_tokens, num_before) - profile.prefill_s(num_tokens)
    assert extra_s >= SLACK * profile.prefill_context_s * num_tokens * num_before - 1e-12
    assert extra_s >= SLACK * (profile.decode_context(num_before) - profile.decode_context(0)) - 1e-12


@given(profiles, chunks)
def test_prompts_do_not_attend_to_each_other(profile: Profile, parts: Chunks) -> None:
    """Prompts that share an iteration take no longer than one prompt of their sum, and no longer than one by one."""
    fresh = [(tokens, 0) for tokens, _ in parts]
    together_s = profile.step_s(fresh, 0, 0)
    assert SLACK * together_s <= profile.prefill_s(sum(tokens for tokens, _ in parts))


@given(profiles, seeds, chunks, decodes, contexts, st.integers(0, 3), st.integers(0, 500), st.integers(0, 5000))
def test_no_time_falls_as_work_grows(
    profile: Profile,
    seed: int | None,
    parts: Chunks,
    num_decodes: int,
    num_context_tokens: int,
    place: int,
    more: int,
    more_context: int,
) -> None:
    """More tokens, chunks, decodes or context never make an iteration shorter."""
    times = Times(profile, seed)
    least_s = SLACK * times.step_s(parts, num_decodes, num_context_tokens)
    place %= len(parts)
    tokens, before = parts[place]
    for changed in ((tokens + more, before), (tokens, before + more_context)):
        grown = [*parts[:place], changed, *parts[place + 1 :]]
        assert times.step_s(grown, num_decodes, num_context_tokens) >= least_s
    assert times.step_s([*parts, (more + 1, more_context)], num_decodes, num_context_tokens) >= least_s
    assert times.step_s(parts, num_decodes + more, num_context_tokens) >= least_s
    assert times.step_s(parts, num_decodes, num_context_tokens + more_context) >= least_s


@given(profiles, seeds, chunks, st.integers(1, 200), contexts, st.floats(1e-3, 2.0))
def test_a_budget_is_exact(
    profile: Profile, seed: int | None, parts: Chunks, num_decodes: int, num_context_tokens: int, target_s: float
) -> None:
    """Prefills get the most tokens whose iteration is in time. If the least number of tokens is too many, they also
    get the tokens that cost nothing in addition.
    """
    times = Times(profile, seed).times
    budget = TokenBudget(target_s, 10**6, times).begin(num_decodes, num_context_tokens)
    aim_s = 0.95 * target_s
    chunks: list[tuple[int, int]] = []
    for tokens, before in parts:
        if not budget.has_room_for(tokens):
            break
        iteration = Iteration(profile, num_decodes, num_context_tokens, chunks)
        least = min(tokens, max(1, MIN_PREFILL_TOKENS - iteration.num_tokens))
        limit_s = max(aim_s, times.step_s(iteration.with_chunk(least, before)))
        taken = budget.take(tokens, before)
        chunks.append((taken, before))
        assert taken >= least
        assert times.step_s(budget.iteration) <= limit_s
        if taken < tokens:
            assert times.step_s(iteration.with_chunk(taken + 1, before)) > limit_s


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_share_iterations_at_their_price(name: str) -> None:
    """A prompt beside one decode takes no less than alone, and two halves of a prompt no less than the whole prompt."""
    profile = SHIPPED[name]
    for num_tokens in (128, 500, 512, 1024, 2048, 4096, 8192):
        assert profile.step_s([(num_tokens, 0)], 1, 1000) > profile.prefill_s(num_tokens)
        half = num_tokens // 2
        assert profile.prefill_s(half) + profile.prefill_s(half, half) >= SLACK * profile.prefill_s(num_tokens)


def test_the_published_times_of_a_prompt_hold_beside_a_decode() -> None:
    """A prompt of 128 tokens took 54.6 ms on Llama-2-70B, and takes as long if it shares its iteration."""
    assert H100.prefill_s(128) == pytest.approx(0.0546, rel=1e-3)
    assert H100.step_s([(128, 0)], 1, 1000) == pytest.approx(0.0546 + H100.decode_context(1000), rel=1e-3)
    whole_s = H100.prefill_s(4096)
    assert SLACK <= (H100.prefill_s(2048) + H100.prefill_s(2048, 2048)) / whole_s < 1.05

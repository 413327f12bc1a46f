"""Counter-based randomness: ``actorserve.core.rng``."""

import pytest
from hypothesis import given, strategies as st

from actorserve.core.rng import _GAMMA, _mix, derive_seed, hash64, uniform

seeds = st.integers(-(2**63), 2**64 - 1)
positions = st.integers(0, 2**32)


def test_mixing_is_splitmix64() -> None:
    """The mixing function gives SplitMix64's published outputs for the state 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [_mix(1234567 + (i + 1) * _GAMMA) for i in range(4)] == published


def test_numbers_never_change() -> None:
    """Recorded values hold, because a change would change the answer to every seed."""
    assert [hash64(0, 0), hash64(1, 0), hash64(0, 1), hash64(2**63, 7)] == [
        12035550249420947055,
        6791897765849424158,
        12935080325729570654,
        3398544264277355572,
    ]
    assert [uniform(42, 0), uniform(42, 1)] == [0.34329192209867343, 0.9557467261317436]
    assert [derive_seed(42, index) for index in range(3)] == [42, 21572623041603123, 7867106979532626534]


@given(seeds, positions)
def test_uniform_is_an_exact_fraction_below_one(seed: int, position: int) -> None:
    """A uniform lies in [0, 1), is a multiple of 2**-53, and depends on the seed modulo 2**64."""
    number = uniform(seed, position)
    assert 0.0 <= number < 1.0
    assert (number * 2**53).is_integer()
    assert uniform(seed + 2**64, position) == number


def test_uniforms_are_spread_evenly() -> None:
    """Over positions and neighbouring seeds, each of 16 equal cells gets its share within six standard deviations."""
    for numbers in ([uniform(7, p) for p in range(16000)], [uniform(s, 3) for s in range(16000)]):
        counts = [0] * 16
        for number in numbers:
            counts[int(number * 16)] += 1
        assert all(abs(count - 1000) < 6 * 1000**0.5 for count in counts)


def test_neighbouring_seeds_and_positions_are_unrelated() -> None:
    """Diagonals, where seed and position trade places, never repeat a number."""
    numbers = {uniform(seed, position) for seed in range(100) for position in range(100)}
    assert len(numbers) == 10_000


@given(seeds)
def test_the_first_choice_keeps_the_seed(seed: int) -> None:
    """Choice 0 of several is sampled like the only choice of the same request."""
    assert derive_seed(seed, 0) == seed


@given(seeds)
def test_choices_have_seeds_of_their_own(seed: int) -> None:
    """Sixteen choices have sixteen different seeds, and derived seeds have 63 bits."""
    derived = [derive_seed(seed, index) for index in range(16)]
    assert len(set(derived)) == 16
    assert all(0 <= other < 2**63 for other in derived[1:])


def test_a_negative_choice_is_an_error() -> None:
    """A negative choice index raises."""
    with pytest.raises(ValueError, match="negative"):
        derive_seed(1, -1)

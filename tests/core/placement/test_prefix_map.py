"""Which instance holds which prefix: names of prefixes, and a bounded memory of placements."""

from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from actorserve.core.messages import Peer, RequestSpec, SamplingParams
from actorserve.core.placement.prefix_map import MAX_HOLDERS, PREFIX_TOKENS, PrefixMap, prefix_names

A, B = Peer("a", 1), Peer("b", 1)


def names(tokens: list[int], salt: str = "") -> tuple[str, ...]:
    return prefix_names(RequestSpec("r", tuple(tokens), SamplingParams(0, 1), cache_salt=salt))


def test_lengths_rise_and_are_few() -> None:
    """Named lengths are multiples of 64 that rise to 32,768, and a quarter of the length apart at most."""
    assert len(PREFIX_TOKENS) == 32
    assert PREFIX_TOKENS[:9] == (64, 128, 192, 256, 320, 384, 448, 512, 640)
    assert PREFIX_TOKENS[-1] == 32_768
    steps = pairwise(PREFIX_TOKENS[8:])
    assert all(low < high <= 1.25 * low and high % 64 == 0 for low, high in steps)


def test_prompts_share_names_as_far_as_they_share_tokens() -> None:
    """Two prompts share the names of the lengths over which they are equal, and no others."""
    first = list(range(1000))
    second = [*range(400), *range(5000, 5600)]
    shared = sum(left == right for left, right in zip(names(first), names(second), strict=True))
    assert PREFIX_TOKENS[:shared] == (64, 128, 192, 256, 320, 384)
    assert not set(names(first)[shared:]) & set(names(second)[shared:])


def test_the_last_token_is_in_no_name() -> None:
    """A prompt of a named length does not have that name, because its last token is always computed."""
    assert names([1] * 64) == ()
    assert len(names([1] * 65)) == 1
    assert len(names([1] * 100_000)) == 32


def test_tenants_share_no_names() -> None:
    """Equal prompts of different salts share no name."""
    assert not set(names([1] * 1000, "x")) & set(names([1] * 1000, "y"))


def test_holders_are_found_with_what_they_hold() -> None:
    """Each instance is found with the longest prefix of this prompt that it holds."""
    prefixes = PrefixMap()
    prompt = names(list(range(1000)))
    prefixes.learn(A, prompt, 10_000)
    prefixes.learn(B, prompt[:2], 10_000)
    assert prefixes.holders(prompt) == {A: PREFIX_TOKENS[len(prompt) - 1], B: 128}
    assert prefixes.holders(prompt[:1]) == {A: 64, B: 64}
    assert prefixes.holders(names([7] * 1000)) == {}
    prefixes.forget(A)
    assert prefixes.holders(prompt) == {B: 128}


@pytest.mark.parametrize("bad", ["x" * 1_000_000, "0" * 17, "", "A" * 16, "g" * 16])
def test_a_text_that_is_no_name_is_not_remembered(bad: str) -> None:
    """A text that names no prefix, however long, takes no memory and has no holder; its neighbours count."""
    prefixes = PrefixMap()
    good = names([1] * 100)[0]
    prefixes.learn(A, (bad, good), 10_000)
    assert prefixes.num_names == 1
    assert prefixes.holders((bad,)) == {}
    assert prefixes.holders((bad, good)) == {A: 128}
    prefixes.learn(A, (bad, good), 0)
    assert (prefixes.num_names, prefixes.num_tokens(A)) == (0, 0)


def test_more_names_than_there_are_lengths_are_passed_over() -> None:
    """Of thousands of names only the first count, as many as there are lengths."""
    prefixes = PrefixMap()
    many = tuple(f"{number:016x}" for number in range(5000))
    prefixes.learn(A, many, 10**9)
    assert prefixes.num_names == len(PREFIX_TOKENS)
    assert prefixes.holders(many[len(PREFIX_TOKENS) :]) == {}


def test_the_beginnings_used_last_stay() -> None:
    """Beyond an instance's memory the prefixes placed there longest ago are forgotten, their tails first."""
    prefixes = PrefixMap()
    old, new = names([1] * 200), names([2] * 200)  # 192 tokens each
    prefixes.learn(A, old, 400)
    prefixes.learn(A, new, 400)
    prefixes.learn(A, old, 400)
    prefixes.learn(A, names([3] * 70), 400)  # 64 more, with room for 16
    assert prefixes.holders(old) == {A: 192}
    assert prefixes.holders(new) == {A: 128}


def test_a_popular_name_is_remembered_of_few_instances() -> None:
    """Of the many instances that hold a name, those that got it last are known."""
    prefixes = PrefixMap()
    peers = [Peer(f"worker-{number}", 1) for number in range(3 * MAX_HOLDERS)]
    for peer in peers:
        prefixes.learn(peer, names([1] * 100), 1000)
    assert list(prefixes.holders(names([1] * 100))) == peers[: -MAX_HOLDERS - 1 : -1]
    assert prefixes.num_tokens(peers[0]) == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 5), st.integers(0, 700), st.sampled_from([0, 100, 500])),
        max_size=80,
    )
)
def test_memory_is_bounded_and_agrees_with_itself(events: list[tuple[int, int, int, int]]) -> None:
    """However many prompts come, an instance has no more than it can hold, and a dead one nothing."""
    prefixes = PrefixMap()
    for number, prompt, length, capacity in events:
        peer = Peer(f"worker-{number}", 1)
        prefixes.learn(peer, names([prompt] * length), capacity)
        assert prefixes.num_tokens(peer) <= capacity or length <= 64  # short prompts have no names, and change nothing
        assert len(prefixes.holders(names([prompt] * 700))) <= MAX_HOLDERS
        peers = {Peer(f"worker-{number}", 1) for number, *_ in events}
        assert 64 * prefixes.num_names <= sum(map(prefixes.num_tokens, peers))
    for number, *_ in events:
        prefixes.forget(Peer(f"worker-{number}", 1))
    assert prefixes.num_names == 0
    assert prefixes.holders(names([0] * 700)) == {}

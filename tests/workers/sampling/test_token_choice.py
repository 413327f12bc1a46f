"""Two implementations choose tokens by the same rules: torch's functions, and our own kernel for CPUs."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from workers import native
from workers.sampling.grammars import Masks
from workers.sampling.token_choice import Rule, choose, choose_natively

pytestmark = pytest.mark.skipif(not native.load(), reason=native.describe())

VOCAB_SIZE = 21
GREEDY = Rule(0.0, 1.0, 0, 0.0, 0.0)
rules = st.builds(
    Rule,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.99, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 3, 10, 1000]),
    min_p=st.sampled_from([0.0, 0.01, 0.2]),
    uniform=st.floats(0.0, 1.0, exclude_max=True),
)
rows = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)
allowed = st.none() | st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1)


def masks_of(sets: dict[int, set[int]]) -> Masks:
    """Masks that allow these tokens, by row."""
    flags: NDArray[np.bool_] = np.zeros((len(sets), VOCAB_SIZE), np.bool_)
    for index, tokens in enumerate(sets.values()):
        flags[index, list(tokens)] = True
    return Masks(tuple(sets), np.packbits(flags, axis=1, bitorder="little"), ())


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(rows, rules, allowed), min_size=1, max_size=5))
def test_both_choose_the_same_tokens(cases: list[tuple[list[float], Rule, set[int] | None]]) -> None:
    """Any mixture of rules and masks gives the same tokens, and masks allow them."""
    logits = torch.tensor([row for row, _, _ in cases])
    wanted = [rule for _, rule, _ in cases]
    sets = {row: tokens for row, (_, _, tokens) in enumerate(cases) if tokens is not None}
    masks = masks_of(sets)
    chosen = choose_natively(logits, wanted, masks)
    assert all(chosen[row] in tokens for row, tokens in sets.items())
    assert chosen == choose(logits, wanted, masks)


@pytest.mark.parametrize("vocab_size", [40_001, 49_152])
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
@pytest.mark.parametrize(
    "rule", [Rule(0.8, 0.95, 0, 0.0, 0.0), Rule(1.3, 0.7, 500, 0.01, 0.0), Rule(2.0, 1.0, 7, 0, 0)]
)
def test_both_choose_the_same_tokens_of_a_large_vocabulary(vocab_size: int, scale: float, rule: Rule) -> None:
    """Flat and peaked logits of a whole vocabulary give the same tokens, whatever the random number."""
    logits = torch.randn(16, vocab_size, generator=torch.Generator().manual_seed(1)) * scale
    wanted = [rule._replace(uniform=number / 16) for number in range(16)]
    assert choose_natively(logits, wanted, None) == choose(logits, wanted, None)


@pytest.mark.parametrize("implementation", [choose, choose_natively])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rule", [GREEDY, Rule(0.9, 0.9, 5, 0.1, 0.5)], ids=["greedy", "sampled"])
def test_a_row_without_finite_logits_gets_a_token(
    implementation: Callable[..., list[int]], value: float, rule: Rule
) -> None:
    """A broken row still gets a token, and no error."""
    (token,) = implementation(torch.full((1, VOCAB_SIZE), value), [rule], masks_of({0: {7, 9}}))
    assert 0 <= token < VOCAB_SIZE


def test_a_broken_row_gets_an_allowed_token() -> None:
    """Our kernel gives a broken row a token that its mask allows, because any other would fail its request."""
    for value in (float("nan"), float("inf"), float("-inf")):
        logits = torch.full((1, VOCAB_SIZE), value)
        assert choose_natively(logits, [GREEDY], masks_of({0: {7, 9}})) == [7]


def test_wrong_shapes_are_refused() -> None:
    """The kernel refuses arguments that do not fit together, because it would read beyond them."""
    logits, fields, mask = torch.zeros(2, 16), torch.zeros(2, 5, dtype=torch.float64), torch.tensor([-1, 0])
    allowed = torch.zeros(1, 2, dtype=torch.uint8)
    run = torch.ops.actorserve.choose
    assert run(logits, fields, mask, allowed).tolist() == [0, 0]
    for wrong in (
        (logits.double(), fields, mask, allowed),
        (logits, fields[:1], mask, allowed),
        (logits, fields, mask[:1], allowed),
        (logits, fields, torch.tensor([-1, 1]), allowed),
        (logits, fields, mask, allowed[:, :1]),
    ):
        with pytest.raises(RuntimeError):
            run(*wrong)

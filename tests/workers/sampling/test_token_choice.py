"""The two ways to choose tokens: row by row on a CPU, and many rows together for a GPU."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from workers.sampling.grammars import Masks
from workers.sampling.logit_edits import apply_masks
from workers.sampling.row_choice import choose_by_row
from workers.sampling.token_choice import Rule, choose_together

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
def test_both_ways_choose_the_same_tokens(cases: list[tuple[list[float], Rule, set[int] | None]]) -> None:
    """Any mixture of rules and masks gives the same tokens row by row and together, and they are allowed."""
    logits = torch.tensor([row for row, _, _ in cases])
    wanted = [rule for _, rule, _ in cases]
    sets = {row: tokens for row, (_, _, tokens) in enumerate(cases) if tokens is not None}
    masks = masks_of(sets)
    by_row = choose_by_row(logits, wanted, masks)
    if sets:
        apply_masks(logits, masks)
    assert by_row == choose_together(logits, wanted)
    assert all(by_row[row] in tokens for row, tokens in sets.items())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rule", [GREEDY, Rule(0.9, 0.9, 5, 0.1, 0.5)], ids=["greedy", "sampled"])
def test_a_row_without_finite_logits_gets_an_allowed_token(value: float, rule: Rule) -> None:
    """A broken row still gets a token that its mask allows, and no error."""
    (token,) = choose_by_row(torch.full((1, VOCAB_SIZE), value), [rule], masks_of({0: {7, 9}}))
    assert token in {7, 9}

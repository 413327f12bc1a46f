"""The kernels that choose tokens on a GPU choose those of torch's functions.

Interpreted tests run in a process of its own, which chooses the interpreter before the import.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests.workers.triton import HAS_TRITON, INTERPRETED, interpreted, needs_interpreter, run_interpreted
from workers.sampling.grammars import Masks
from workers.sampling.token_choice import Rule, choose
from workers.sampling.triton_choice import choose_on_gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
GREEDY = Rule(0.0, 1.0, 0, 0.0, 0.0)
VOCAB_SIZE = 21
rules_of_rows = st.builds(
    Rule,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.99, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 3, 10, 1000]),
    min_p=st.sampled_from([0.0, 0.01, 0.2]),
    uniform=st.floats(0.0, 1.0, exclude_max=True),
)
rows = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)
allowed_tokens = st.none() | st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1)


def masks_of(sets: dict[int, set[int]], vocab_size: int) -> Masks:
    flags: NDArray[np.bool_] = np.zeros((len(sets), vocab_size), np.bool_)
    for index, tokens in enumerate(sets.values()):
        flags[index, list(tokens)] = True
    return Masks(tuple(sets), np.packbits(flags, axis=1, bitorder="little"), ())


def on_gpu(logits: Tensor, rules: Sequence[Rule], sets: dict[int, set[int]] | None = None) -> list[int]:
    masks = masks_of(sets or {}, logits.shape[1])
    mask_of = torch.full((len(rules),), -1)
    for index, row in enumerate(masks.rows):
        mask_of[row] = index
    fields = torch.tensor(rules, dtype=torch.float64)
    tensors = (logits, fields, mask_of, torch.from_numpy(masks.allowed))
    return choose_on_gpu(*(tensor.to(DEVICE) for tensor in tensors)).tolist()


def check(logits: Tensor, rules: Sequence[Rule], sets: dict[int, set[int]] | None = None) -> None:
    masks = masks_of(sets or {}, logits.shape[1])
    assert on_gpu(logits, rules, sets) == choose(logits.clone(), rules, masks)


@needs_interpreter
def test_kernels_in_the_interpreter() -> None:
    """All interpreted tests of this file pass in a process whose Triton interprets."""
    run_interpreted(__file__)


@interpreted
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(rows, rules_of_rows, allowed_tokens), min_size=1, max_size=4))
def test_interpreted_equals_torch(cases: list[tuple[list[float], Rule, set[int] | None]]) -> None:
    """Any mixture of rules and masks gives the tokens of torch's functions."""
    sets = {row: tokens for row, (_, _, tokens) in enumerate(cases) if tokens is not None}
    check(torch.tensor([row for row, _, _ in cases]), [rule for _, rule, _ in cases], sets)


RULES = (
    Rule(1.0, 1.0, 0, 0.0, 0.0),
    Rule(0.8, 0.95, 0, 0.0, 0.0),
    Rule(1.3, 0.7, 300, 0.01, 0.0),
    Rule(1.0, 1.0, 7, 0.0, 0.0),
    Rule(0.8, 0.9, 40, 0.0, 0.0),
    GREEDY,
)


def check_a_vocabulary(vocab_size: int, scale: float) -> None:
    logits = torch.randn(len(RULES), vocab_size, generator=torch.Generator().manual_seed(1)) * scale
    for number in range(3):
        check(logits, [rule._replace(uniform=(number + 0.3) / 3) for rule in RULES])


@interpreted
@pytest.mark.parametrize("scale", [0.01, 3.0])
@pytest.mark.parametrize("vocab_size", [128, 5001])
def test_interpreted_large_vocabulary_equals_torch(vocab_size: int, scale: float) -> None:
    """Flat and peaked logits of several chunks give the tokens of torch's functions."""
    check_a_vocabulary(vocab_size, scale)


@interpreted
@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_interpreted_ends_of_the_interval(uniform: float) -> None:
    """The least and the greatest random number choose the first and the last token of those kept."""
    logits = torch.tensor([[-100.0, 3.0, 2.0, 3.0, 1.0, -100.0]])
    for rule, tokens in ((RULES[0], (1, 4)), (Rule(1.0, 1.0, 2, 0.0, 0.0), (1, 3)), (Rule(1.0, 0.5, 0, 0, 0), (1, 3))):
        assert on_gpu(logits, [rule._replace(uniform=uniform)]) == [tokens[uniform > 0.5]]
        check(logits, [rule._replace(uniform=uniform)])


@interpreted
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rule", [GREEDY, Rule(0.9, 0.9, 5, 0.1, 0.5)], ids=["greedy", "sampled"])
def test_interpreted_broken_row_gets_an_allowed_token(value: float, rule: Rule) -> None:
    """A row without finite logits gets the first token that its mask allows, and no error."""
    assert on_gpu(torch.full((1, VOCAB_SIZE), value), [rule], {0: {7, 9}}) == [7]


@interpreted
def test_interpreted_nan_is_found_among_numbers() -> None:
    """A NaN among finite logits is chosen, as torch's argmax does; a forbidden one is not."""
    logits = torch.arange(300.0).repeat(2, 1)
    logits[:, 200] = torch.nan
    assert on_gpu(logits, [RULES[0]] * 2, {1: {3, 200}}) == [200, 200]
    assert on_gpu(logits, [GREEDY] * 2, {0: {3, 5}, 1: {5, 2}}) == [5, 5]


@interpreted
def test_interpreted_zeros_of_both_signs_are_equal() -> None:
    """Plus and minus zero are equal logits, so the first of them is the best, and top_k keeps both."""
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0]])
    assert on_gpu(logits, [GREEDY]) == [1]
    check(logits, [Rule(1.0, 1.0, 1, 0.0, 0.9)])


@interpreted
def test_interpreted_rows_of_a_wider_tensor() -> None:
    """Rows that do not lie one after another are read in place, and are not edited."""
    wide = torch.randn(4, 300, generator=torch.Generator().manual_seed(2))
    before = wide.clone()
    rule = Rule(1.0, 0.9, 0, 0.0, 0.4)
    assert on_gpu(wide[:, :200], [rule] * 4, {2: {1, 60}}) == on_gpu(
        wide[:, :200].contiguous(), [rule] * 4, {2: {1, 60}}
    )
    assert torch.equal(wide, before)


@pytest.mark.parametrize("wrong", ["logits", "rules", "masks", "allowed"])
def test_wrong_shapes_are_refused(wrong: str) -> None:
    """Tensors that do not fit together are refused by name, because the kernels would read beyond them."""
    tensors = {
        "logits": torch.zeros(2, 16),
        "rules": torch.zeros(2, 5, dtype=torch.float64),
        "masks": torch.tensor([-1, 0]),
        "allowed": torch.zeros(1, 2, dtype=torch.uint8),
    }
    tensors[wrong] = tensors[wrong].double() if wrong == "logits" else tensors[wrong][..., :-1]
    with pytest.raises(ValueError, match=wrong):
        choose_on_gpu(**tensors)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_TRITON or INTERPRETED or not torch.cuda.is_available(), reason="needs CUDA and triton")
@pytest.mark.parametrize("scale", [0.01, 3.0])
@pytest.mark.parametrize("vocab_size", [128, 5001, 128_256, 2**20])
def test_cuda_equals_torch(vocab_size: int, scale: float) -> None:
    """On CUDA flat and peaked logits of any vocabulary give the tokens of torch's functions."""
    check_a_vocabulary(vocab_size, scale)

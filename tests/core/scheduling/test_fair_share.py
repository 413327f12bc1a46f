"""The account of a minimum share: what a class is owed, within bounds, by either way of counting."""

import pytest
from hypothesis import given, strategies as st

from actorserve.core.scheduling.fair_share import FairShare, MinShare


def test_lower_classes_share_the_minimum_in_equal_parts() -> None:
    """A quarter of all for two classes is an eighth for each, or a seventh of what the others get."""
    share = MinShare(0.25)
    assert share.of_all(2) == 0.125
    assert share.of_others(2) == pytest.approx(1 / 7)


def test_an_account_keeps_its_bounds() -> None:
    """What a class is owed grows by what it is due, falls by what it received, and stays between the bounds."""
    account = FairShare()
    account.settle(0.75, 0.0, least=0.0, most=1.0)
    assert account.owed == 0.75
    account.settle(0.75, 0.0, least=0.0, most=1.0)
    assert account.owed == 1.0
    account.settle(0.0, 3.0, least=0.0, most=1.0)
    assert account.owed == 0.0
    account.settle(0.0, 3.0, least=-2.0)
    assert account.owed == -2.0


@pytest.mark.parametrize("min_share", [-0.1, 1.0, float("nan")])
def test_a_share_must_leave_something_to_the_most_urgent_class(min_share: float) -> None:
    """The message names the wrong value and the expected range."""
    with pytest.raises(ValueError, match=r"min_share is .*; expected a share from 0 to below 1"):
        MinShare(min_share)


@given(
    st.sampled_from([0.05, 0.1, 0.5, 0.9]),
    st.integers(1, 4),
    st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 10.0)), max_size=20),
)
def test_both_ways_of_counting_are_the_same_share(
    min_share: float, num_lower: int, served: list[tuple[float, float]]
) -> None:
    """Without bounds, what is due of the others' service differs from what is due of all by a constant factor alone."""
    share = MinShare(min_share)
    of_all, of_others = FairShare(), FairShare()
    for own, others in served:
        of_all.settle(share.of_all(num_lower) * (own + others), own)
        of_others.settle(share.of_others(num_lower) * others, own)
    assert of_others.owed * (1.0 - share.of_all(num_lower)) == pytest.approx(of_all.owed, abs=1e-9)

"""How many tokens iterations hold over time, as the simulator measures it."""

import pytest

from actorserve.sim.measures.occupancy import Occupancy
from tests.sim.runs import NETWORK_S, run


def test_each_number_of_tokens_counts_for_its_time() -> None:
    """A long iteration of few tokens counts more than a short one of many, and the rest of the time is idle."""
    occupancy = Occupancy(100.0)
    occupancy.add(2, 3.0, 3.0)
    occupancy.add(8, 1.0, 4.0)
    occupancy.live(0.0, 10.0)
    figures = occupancy.figures()
    assert figures["busy"] == pytest.approx(0.4)
    assert figures["tokens"]["mean"] == pytest.approx((3 * 2 + 8) / 4)
    assert (figures["tokens"]["p50"], figures["tokens"]["p75"], figures["tokens"]["p90"]) == (2, 2, 8)
    at_most = [figures["at_most"][str(step)] for step in (0, 1, 2, 4, 8, 16)]
    assert at_most == pytest.approx([0.6, 0.6, 0.9, 0.9, 1.0, 1.0])


def test_what_happens_after_the_last_arrival_does_not_count() -> None:
    """An iteration that goes on beyond the end counts until then, and a life ends there."""
    occupancy = Occupancy(5.0)
    occupancy.add(3, 4.0, 7.0)
    occupancy.add(1, 4.0, 11.0)
    occupancy.live(0.0, 11.0)
    assert occupancy.alive_s == 5.0
    assert occupancy.seconds == {3: 2.0}


def test_instances_without_an_iteration_are_idle() -> None:
    """There are no numbers of tokens, and all the time has none."""
    occupancy = Occupancy(5.0)
    occupancy.live(0.0, 5.0)
    figures = occupancy.figures()
    assert (figures["busy"], figures["tokens"], figures["at_most"]["0"]) == (0.0, None, 1.0)


def test_a_request_alone() -> None:
    """Its prompt of 11 tokens takes 2 s, and its other three tokens 0.5 s each."""
    results = run({"num_requests": 1})
    (found,) = results.occupancies.values()
    assert found.seconds == pytest.approx({11: 2.0, 1: 1.5})
    ended_s = results.outcomes.ended_s[0]
    assert found.alive_s == pytest.approx(ended_s)
    assert ended_s > 3.5 + NETWORK_S


def test_a_batch_counts_its_requests() -> None:
    """Three requests that come almost together decode together, until the first one has its last token."""
    results = run({"num_requests": 3, "arrivals": {"rate_per_s": 1e3}, "cluster": {"late_binding": False}})
    (found,) = results.occupancies.values()
    assert (found.seconds[3], found.seconds[2]) == pytest.approx((1.0, 0.5))

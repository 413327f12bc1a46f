"""Measures of a run in bounded memory: rows that move to a file, distributions, and gaps between tokens."""

import math
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from actorserve.core.messages import FinishReason
from actorserve.errors import SimulationError
from actorserve.sim.measures.distribution import MAX_ERROR, MAX_EXACT, Distribution
from actorserve.sim.measures.rows import PAGE_ROWS, Column, Rows
from actorserve.sim.measures.token_gaps import TokenGaps
from actorserve.sim.results import Outcomes, summary
from actorserve.sim.simulation import Simulation
from tests.sim.profiles import PROFILE
from tests.sim.runs import MOVING, config, run
from tools.simulation.experiment import merged

DTYPE = np.dtype([("time", "f8"), ("count", "i4")])


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The system refuses to let a file grow further, as it does where a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_closed_rows_leave_the_memory_and_can_be_read() -> None:
    """Only pages with open rows stay in memory; a row in the file is read and changed like any other."""
    rows = Rows(DTYPE)
    num_rows = 5 * PAGE_ROWS // 2
    times: Column[float] = Column(rows, "time")
    counts: Column[int] = Column(rows, "count")
    for number in range(num_rows):
        assert rows.append((number / 8, 0)) == number
    for number in range(num_rows):
        if number != 7:
            counts[number] = number
            rows.close(number)
    assert rows.num_pages_in_memory == 2  # row 7 is open, and the last page is not full
    rows.close(7)
    assert rows.num_pages_in_memory == 1
    counts[7] = -1
    assert (counts[7], counts[8], times[8], counts[-1]) == (-1, 8, 1.0, num_rows - 1)
    assert list(times) == [number / 8 for number in range(num_rows)]
    assert sum(counts) == num_rows * (num_rows - 1) // 2 - 8
    with pytest.raises(IndexError):
        times[num_rows]


def test_a_full_disk_is_told() -> None:
    """Rows that cannot be written give an error of one line that names the folder and what was expected."""
    rows = Rows(DTYPE)
    for number in range(PAGE_ROWS):
        rows.append((0.0, number))
    for number in range(PAGE_ROWS - 1):
        rows.close(number)
    told = r"to a file in /.*: File too large: expected room for them; TMPDIR names another folder"
    with files_of_at_most(1000), pytest.raises(SimulationError, match=told):
        rows.close(PAGE_ROWS - 1)


def test_figures_are_the_same_from_the_file() -> None:
    """Latencies of requests that fill several pages are those that their times give, to the last bit."""
    rng, outcomes = random.Random(1), Outcomes()
    expected: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(2 * PAGE_ROWS + 100):
        priority, came_s = rng.randrange(2), rng.uniform(0.0, 100.0)
        number = outcomes.arrive(came_s, 5, 1, priority)
        ended_s = came_s + rng.expovariate(1.0)
        outcomes.first_token_s[number] = ended_s
        is_done = rng.random() < 0.9
        outcomes.end(number, ended_s, FinishReason.LENGTH if is_done else FinishReason.ERROR)
        if is_done:
            expected[priority].append(ended_s - came_s)
    assert outcomes.num_completed() == len(expected[0]) + len(expected[1])
    assert outcomes.num_refused() == len(outcomes) - outcomes.num_completed()
    assert outcomes.classes() == [0, 1]
    assert outcomes.latencies()["ttft_s"] == summary(expected[0] + expected[1])
    assert outcomes.latencies(1)["e2e_s"] == summary(expected[1])
    assert outcomes.latencies()["tpot_s"] is None  # a request of one token has no TPOT


def test_few_distinct_values_stay_exact() -> None:
    """A distribution of values, however often each occurs, has the summary of the list of them."""
    rng, found = random.Random(2), Distribution()
    values: list[float] = []
    for _ in range(1000):
        value, count = rng.expovariate(3.0), rng.randrange(1, 30)
        found.add(value, count)
        values += [value] * count
    exact, near = summary(values), found.summary()
    assert exact is not None
    assert near == exact | {"mean": pytest.approx(exact["mean"])}
    assert Distribution().summary() is None


@pytest.mark.parametrize("draw", ["lognormal", "uniform", "wide"])
def test_many_distinct_values_are_within_the_stated_error(draw: str) -> None:
    """Percentiles of more values than are kept are within a thousandth, the mean and the highest value are exact, and
    memory is bounded.
    """
    rng, found = random.Random(3), Distribution()
    draws: dict[str, Callable[[], float]] = {
        "lognormal": lambda: rng.lognormvariate(-3.0, 1.0),
        "uniform": lambda: rng.uniform(0.02, 0.03),
        "wide": lambda: 10.0 ** rng.uniform(-9.0, 6.0),
    }
    values = [draws[draw]() for _ in range(3 * MAX_EXACT)]
    for value in values:
        found.add(value)
    exact, near = summary(values), found.summary()
    assert exact is not None
    assert near is not None
    assert MAX_ERROR < 0.001
    assert near["max"] == exact["max"]
    assert near["mean"] == pytest.approx(fmean(values), rel=1e-12)
    for name in ("p50", "p90", "p95", "p99"):
        assert near[name] == pytest.approx(exact[name], rel=MAX_ERROR)
    assert found.num_kept < MAX_EXACT + 30_000  # 512 steps for each power of two
    assert near != exact


def test_the_mean_does_not_depend_on_how_values_are_added() -> None:
    """Values added one by one, together, or in another order have the same mean to the last digit."""
    values = [0.1, 0.7, 1e-6, 123.4] * 7
    means = set()
    for order in (values, values[::-1], sorted(values)):
        singly = Distribution()
        for value in order:
            singly.add(value)
        means.add(singly.mean)
    together = Distribution()
    for value in dict.fromkeys(values):
        together.add(value, 7)
    assert means == {together.mean}


def test_gaps_are_between_the_tokens_of_one_request() -> None:
    """A gap reaches from a request's token to its next one, on the same instance or on another, and a request that
    ended leaves nothing behind.
    """
    gaps = TokenGaps()
    gaps.on_iterations("a", ("1", "2"), (1.0,))  # first tokens
    gaps.on_iterations("a", ("1", "2"), (1.5, 2.0, 3.0))
    assert gaps.gaps.num_values == 6
    gaps.on_iterations("a", ("2", "3"), (4.0,))  # 1 is preempted
    gaps.on_iterations("b", ("2",), (6.0,))  # it has migrated
    gaps.on_iterations("a", ("1", "3"), (10.0,))
    gaps.on_lost("a")
    gaps.on_iterations("b", ("1", "3"), (16.0,))
    for request_id in ("1", "2", "3"):
        gaps.on_end(request_id)
    expected = [0.5, 0.5, 1.0] * 2 + [1.0, 2.0, 7.0, 6.0, 6.0, 6.0]
    found = gaps.gaps.summary()
    assert found == summary(expected)
    assert not gaps.num_followed


def test_a_request_that_comes_back_has_gaps_of_its_own() -> None:
    """A request that got tokens elsewhere, while its first instance made none, has its gap from the newest of them."""
    gaps = TokenGaps()
    gaps.on_iterations("a", ("1", "2"), (1.0,))
    gaps.on_iterations("b", ("1",), (3.0, 4.0))
    gaps.on_iterations("a", ("1", "2"), (5.0,))
    assert gaps.gaps.summary() == summary([2.0, 1.0, 1.0, 4.0])
    gaps.on_iterations("b", ("2",), (6.0,))
    gaps.on_iterations("a", ("1",), (7.0,))  # the others of the same iteration stay
    assert gaps.gaps.summary() == summary([2.0, 1.0, 1.0, 4.0, 1.0, 2.0])


FAILING: dict[str, Any] = MOVING | {
    "failures": [
        {"process": "worker-3", "at_s": 20.0, "restart_at_s": 24.0},
        {"process": "worker-1", "at_s": 60.0},
    ],
}


@pytest.mark.parametrize("mode", ["live", "recompute"])
@pytest.mark.parametrize("policy", ["fcfs", "skip_join_mlfq"])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_gaps_fill_the_time_between_first_and_last_token(mode: str, policy: str, run_ahead: bool) -> None:
    """With preemption, migration and dying workers, each token but a request's first has one gap, and their sum is the
    time that clients saw between first and last tokens.
    """
    changes = {"cluster": {"policy": policy, "run_ahead": run_ahead, "migration": {"mode": mode}}}
    simulation = Simulation(config(merged(FAILING, changes)), [PROFILE])
    results = simulation.run()
    figures, outcomes = results.figures(), results.outcomes
    assert figures["requests"]["completed"] == 150
    assert figures["preemptions"] > 0
    assert figures["migration"]["migrated"] > 0
    assert figures["failovers"] > 0
    assert results.tbt.num_values == sum(num_output - 1 for num_output in outcomes.num_output)
    lasted_s = math.fsum(
        ended_s - first_s for first_s, ended_s in zip(outcomes.first_token_s, outcomes.ended_s, strict=True)
    )
    assert results.tbt.mean * results.tbt.num_values == pytest.approx(lasted_s)
    assert simulation._token_gaps.num_followed == simulation._interruptions.num_followed == 0  # all have ended


def test_tbt_differs_from_tpot() -> None:
    """TPOT has one value for each request, and TBT one for each token, so that a single long gap shows in TBT alone."""
    latency = run({"lengths": {"output": 40}, "cluster": {"noise": 0.3}}).figures()["latency"]
    assert latency["tpot_s"]["p50"] == pytest.approx(latency["tbt_s"]["mean"])
    assert latency["tbt_s"]["p99"] > 1.2 * latency["tpot_s"]["p99"]

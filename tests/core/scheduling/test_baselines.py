"""The baseline policies: their rules and their names."""

import math

import pytest
from hypothesis import given, strategies as st

from actorserve.core.scheduling.baselines import (
    FixedPriority,
    NaiveMLFQ,
    PaperSkipJoinMLFQ,
    ShortestRemainingTime,
)
from actorserve.core.scheduling.policies import POLICIES, make_policy
from tests.core.harness.policy_driver import latencies_s, names, request, run_iteration, step_times

TIMES = step_times({1: 1.0, 101: 101.0}, decode_s=1.0)


def test_naive_mlfq_joins_at_the_top_and_goes_down_one_by_one() -> None:
    """A prompt of 8 s joins Q1, and after its prefill it is in the level of 2 s."""
    policy = NaiveMLFQ(TIMES)
    one = request("a", 8)
    policy.add(one, 0.0)
    assert policy.attained(one, 0.0).quantum_s == 1.0
    run_iteration(policy, TIMES, one, 0.0, num_tokens=4)
    assert policy.attained(one, 4.0).quantum_s == 2.0


def test_naive_mlfq_promotes_as_well() -> None:
    """Its promotion is that of the skip-join queue."""
    policy = NaiveMLFQ(TIMES, promote_after_s=0.5)
    one = request("a", 8)
    policy.add(one, 0.0)
    run_iteration(policy, TIMES, one, 0.0)
    policy.order(8.5)
    assert policy.attained(one, 8.5).quantum_s == 1.0


def test_the_papers_queue_promotes_all_at_once() -> None:
    """All requests that have waited too long go to the top together, and a computed prompt stays in its level."""
    policy = PaperSkipJoinMLFQ(TIMES, promote_after_s=100.0)
    requests = [request(name, 8) for name in "abc"]
    for one in requests:
        policy.add(one, 0.0)
    run_iteration(policy, TIMES, requests[0], 0.0, num_tokens=8)
    assert [policy.attained(one, 8.0).quantum_s for one in requests] == [16.0, 8.0, 8.0]
    policy.order(101.0)
    assert [policy.attained(one, 101.0).quantum_s for one in requests] == [16.0, 1.0, 1.0]


def test_fixed_priority_goes_by_input_length_for_good() -> None:
    """The shortest input comes first however long it decodes, ties in order of arrival; cached tokens do not count."""
    policy = FixedPriority(TIMES)
    short = request("s", 2, max_tokens=50)
    policy.add(request("l", 9), 0.0)
    policy.add(short, 0.0)
    policy.add(request("t", 2), 0.0)
    policy.add(request("c", 9), 0.0, num_cached_tokens=8)
    for _ in range(40):
        run_iteration(policy, TIMES, short, 0.0)
    assert names(policy, 1e6) == "cstl"


def test_srpt_goes_by_what_is_left() -> None:
    """A new request overtakes a request with more time left, but not one with less."""
    policy = ShortestRemainingTime(TIMES)
    long = request("l", 10, max_tokens=5)
    policy.add(long, 0.0)
    policy.add(request("m", 2, max_tokens=4), 0.0)
    assert names(policy, 0.0) == "ml"  # 5 s before 14 s
    run_iteration(policy, TIMES, long, 0.0, num_tokens=8)
    assert names(policy, 0.0) == "ml"  # 5 s before 6 s
    run_iteration(policy, TIMES, long, 0.0)
    assert names(policy, 0.0) == "lm"  # 4 s before 5 s


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_srpt_has_the_least_mean_latency(sizes: list[tuple[int, int]]) -> None:
    """For requests that come at once, no other policy has a lower mean latency on a batch of one."""

    def mean_s(name: str) -> float:
        made = [request(f"{i}", prompt, max_tokens=output) for i, (prompt, output) in enumerate(sizes)]
        ended = latencies_s(make_policy(name, TIMES, promote_after_s=math.inf), TIMES, made)
        assert len(ended) == len(sizes)
        return sum(ended.values()) / len(sizes)

    least_s = mean_s("srpt")
    assert all(least_s <= mean_s(name) for name in POLICIES)


def test_estimated_starts_add_up_the_requests_before() -> None:
    """A request starts after the times of those before it, shared by the batch."""
    policy = ShortestRemainingTime(TIMES)
    for name, tokens in (("a", 4), ("b", 2), ("c", 8)):
        policy.add(request(name, tokens, max_tokens=1), 0.0)
    assert policy.next_starts_s(policy.order(0.0), 0.0, 2) == [0.0, 1.0, 3.0]


def test_every_policy_has_a_name() -> None:
    """The settings' names make policies; only fcfs_reserving reserves output, and only FCFS does not preempt."""
    made = {name: make_policy(name, TIMES) for name in POLICIES}
    assert {name for name, policy in made.items() if policy.reserves_output} == {"fcfs_reserving"}
    assert {name for name, policy in made.items() if not policy.is_preemptive} == {"fcfs", "fcfs_reserving"}


def test_an_unknown_name_is_refused_with_those_known() -> None:
    """The message names the unknown policy and the known ones."""
    with pytest.raises(
        ValueError, match=r"unknown policy 'lifo'; expected one of skip_join_mlfq, shortest_expected, fcfs"
    ):
        make_policy("lifo", TIMES)


def test_a_class_may_have_a_promotion_time_of_its_own() -> None:
    """Other classes have the common one; a time of 0 s is refused with its priority."""
    policy = make_policy("skip_join_mlfq", TIMES, promote_after_s=8.0, promote_after_s_of={1: 2.0})
    a, b = request("a", 4, priority=0), request("b", 4, priority=1)
    policy.add(a, 0.0)
    policy.add(b, 0.0)
    policy.order(7.9)
    assert (policy.attained(a, 7.9).quantum_s, policy.attained(b, 7.9).quantum_s) == (4.0, 1.0)
    policy.order(8.0)
    assert policy.attained(a, 8.0).quantum_s == 1.0
    with pytest.raises(ValueError, match="promote_after_s of priority 3 is 0; expected a time above 0 s"):
        make_policy("fcfs", TIMES, promote_after_s_of={3: 0})

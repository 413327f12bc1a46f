"""Priority classes: the more urgent first, a minimum share for the others, and no effect on a single class."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from actorserve.core.messages import Attained
from actorserve.core.request import Request
from actorserve.core.scheduling.mlfq import SkipJoinMLFQ
from actorserve.core.scheduling.policies import POLICIES, make_policy
from actorserve.core.scheduling.policy import FirstComeFirstServed
from actorserve.core.scheduling.priority_classes import PriorityClasses
from tests.core.harness.policy_driver import names, request, serve_one, step_times

TIMES = step_times({1: 1.0, 101: 101.0}, decode_s=1.0)


def classes(min_share: float = 0.1) -> PriorityClasses:
    return PriorityClasses(lambda priority: FirstComeFirstServed(), min_share)


def fill(policy: PriorityClasses, counts: dict[int, int]) -> None:
    """Add this many requests of each priority, named after it."""
    for priority, count in counts.items():
        for _ in range(count):
            policy.add(request(f"{priority}", 4, priority=priority), 0.0)


def serve(
    policy: PriorityClasses, iterations: int, batch: int, service_s: Callable[[Request], float] = lambda one: 1.0
) -> Counter[int]:
    """The service of each priority, if each iteration serves the front of the order."""
    had: Counter[int] = Counter()
    for now in range(iterations):
        policy.validate()
        for one in list(policy.order(float(now)))[:batch]:
            seconds = service_s(one)
            had[one.spec.priority] += seconds  # type: ignore[assignment]  # a float
            serve_one(policy, one, seconds, float(now))
    return had


def test_a_lower_number_is_more_urgent() -> None:
    """As in vLLM's API, with negative numbers before 0; inside a class the policy's own order holds."""
    policy = PriorityClasses(lambda priority: SkipJoinMLFQ(TIMES), 0.1)
    for name, tokens, priority in (("f", 8, 5), ("e", 1, 5), ("d", 9, 0), ("c", 2, 0), ("b", 4, -1), ("a", 2, -1)):
        policy.add(request(name, tokens, priority=priority), 0.0)
    assert names(policy, 0.0) == "abcdef"


def test_one_class_is_its_policy() -> None:
    """Its order, starts and attained service are those of the policy alone."""
    alone, composed = SkipJoinMLFQ(TIMES), PriorityClasses(lambda priority: SkipJoinMLFQ(TIMES), 0.1)
    made = [request(f"{tokens}", tokens, priority=3) for tokens in (8, 2, 4)]
    for policy in (alone, composed):
        for one in made:
            policy.add(one, 0.0, attained=Attained(waited_s=0.125))
        serve_one(policy, made[1], 2.0, 0.0625)
    order = composed.order(0.125)
    assert order == alone.order(0.125)
    assert composed.next_starts_s(order, 0.125, 1) == alone.next_starts_s(order, 0.125, 1)
    assert [composed.attained(one, 0.125) for one in made] == [alone.attained(one, 0.125) for one in made]


def test_no_requests_are_an_order_too() -> None:
    """Without requests the order and the starts are empty."""
    policy = classes()
    fill(policy, {0: 1})
    policy.remove(policy.order(0.0)[0])
    assert list(policy.order(0.0)) == []
    assert policy.next_starts_s([], 0.0, 1) == []


@pytest.mark.parametrize("batch", [1, 8, 40])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_a_lower_class_keeps_its_share_and_not_more(share: float, batch: int) -> None:
    """While the urgent class could use everything, the other one gets its share, whatever the batch."""
    policy = classes(share)
    fill(policy, {0: 100, 7: 100})
    had = serve(policy, 1000, batch)
    assert had[7] / had.total() == pytest.approx(share, abs=0.002)


def test_a_large_batch_always_holds_the_same_few() -> None:
    """The share is given in each iteration to the same requests, so that classes do not take turns on the memory."""
    policy = classes(0.1)
    fill(policy, {0: 100, 1: 100})
    serve(policy, 100, 40)
    seen = Counter[Request]()
    for _ in range(100):
        batch = list(policy.order(0.0))[:40]
        seen.update(one for one in batch if one.spec.priority == 1)
        for one in batch:
            serve_one(policy, one, 1.0, 0.0)
    assert 400 <= seen.total() <= 410
    assert len(seen) <= 6


def test_lower_classes_share_what_they_keep() -> None:
    """However many classes clients invent, all below the most urgent one keep the minimum share together."""
    policy = classes(0.2)
    fill(policy, dict.fromkeys(range(5), 100))
    had = serve(policy, 4000, 4)
    assert had[0] / had.total() == pytest.approx(0.8, abs=0.01)
    assert [had[priority] / had.total() for priority in range(1, 5)] == pytest.approx([0.05] * 4, abs=0.005)


def test_without_a_share_classes_are_strict() -> None:
    """A minimum share of 0 lets a lower class wait for ever."""
    policy = classes(0.0)
    fill(policy, {0: 10, 1: 10})
    assert serve(policy, 100, 4) == {0: 400}


@pytest.mark.parametrize("num_urgent", [0, 1])
def test_room_that_was_left_is_not_paid_for_later(num_urgent: int) -> None:
    """A class that long had most of the engine still gets its share when more urgent requests come."""
    policy = classes(0.1)
    fill(policy, {0: num_urgent, 1: 10})
    serve(policy, 1000, 4)
    fill(policy, {0: 10})
    assert serve(policy, 200, 4)[1] >= 0.1 * 200 * 4 - 8


@pytest.mark.parametrize("counts", [{1: 5}, {1: 5, 2: 5}])
def test_the_most_urgent_class_has_no_claims(counts: dict[int, int]) -> None:
    """A class is owed nothing once it was the most urgent one."""
    policy = classes(0.1)
    fill(policy, {0: 1, **counts})
    urgent = policy.order(0.0)[0]
    serve_one(policy, urgent, 1000.0, 0.0)
    assert policy.order(0.0)[0].spec.priority == 1
    policy.remove(urgent)
    serve(policy, 2, 1)
    policy.order(0.0)
    fill(policy, {0: 1})
    assert names(policy, 0.0).replace("2", "") == "011111"


def test_an_iteration_of_no_time_changes_nothing() -> None:
    """An iteration may take 0 s by the profile, and a share of that is 0 s too."""
    policy = classes(0.1)
    fill(policy, {0: 5, 1: 5})
    serve(policy, 20, 4, lambda one: 0.0)
    assert names(policy, 0.0) == "0000011111"
    serve_one(policy, policy.order(0.0)[0], 1.0, 0.0)
    serve_one(policy, policy.order(0.0)[-1], 0.0, 0.0)
    serve_one(policy, policy.order(0.0)[-1], 0.0, 0.0)
    assert names(policy, 0.0) == "1000001111"


def test_claims_do_not_pile_up() -> None:
    """A class too small to use its share does not shut the urgent ones out when more of its requests come."""
    policy = classes(0.1)
    fill(policy, {0: 100, 1: 1})
    assert serve(policy, 1000, 40)[1] == pytest.approx(1000, abs=10)
    fill(policy, {1: 100})
    assert serve(policy, 100, 40)[1] == pytest.approx(0.1 * 100 * 40, rel=0.1)


def test_a_class_gains_nothing_by_coming_and_going() -> None:
    """Requests of a lower class that come one after the other get its share, as if they came at once."""
    policy = classes(0.1)
    fill(policy, {0: 5})
    had = 0
    for _ in range(1000):
        if len(policy.order(0.0)) == 5:
            fill(policy, {1: 1})
        first = policy.order(0.0)[0]
        serve_one(policy, first, 1.0, 0.0)
        if first.spec.priority == 1:
            had += 1
            policy.remove(first)
    assert 60 <= had <= 110


def test_estimated_starts_of_lower_classes_are_later() -> None:
    """A request starts after the more urgent ones before it; a request that its class's share puts first waits for
    none.
    """
    policy = PriorityClasses(lambda priority: SkipJoinMLFQ(TIMES, promote_after_s=1000.0), 0.1)
    for name, tokens, priority in (("a", 1, 0), ("b", 4, 0), ("c", 1, 1), ("d", 4, 1)):
        policy.add(request(name, tokens, priority=priority), 0.0)
    assert names(policy, 0.0) == "abcd"
    assert policy.next_starts_s(policy.order(0.0), 0.0, 1) == [0.0, 3.0, 3.0, 6.0]
    serve_one(policy, policy.order(0.0)[1], 0.5, 0.0)
    assert names(policy, 0.0) == "cabd"
    assert policy.next_starts_s(policy.order(0.0), 0.0, 1) == [0.0, 0.0, 3.0, 6.0]


def test_the_levels_of_all_classes_are_counted_together() -> None:
    """Two classes with requests in two levels and in one are summed level by level."""
    policy = PriorityClasses(lambda _: SkipJoinMLFQ(TIMES), 0.0)
    assert policy.num_by_level() == []
    for name, tokens, priority in (("a", 1, 0), ("b", 2, 0), ("c", 1, 5)):
        policy.add(request(name, tokens, priority=priority), 0.0)
    assert policy.num_by_level() == [2, 1]


def test_several_classes_preempt_even_if_a_single_class_does_not() -> None:
    """An urgent request goes before started requests of other classes."""
    policy = classes()
    fill(policy, {1: 1})
    assert not policy.is_preemptive
    fill(policy, {0: 1})
    assert policy.is_preemptive


@pytest.mark.parametrize("min_share", [-0.1, 1.0, float("nan")])
def test_a_share_must_leave_something_to_the_urgent_class(min_share: float) -> None:
    """The message names the wrong value and the expected range."""
    with pytest.raises(ValueError, match=r"min_share is .*; expected a share from 0 to below 1"):
        classes(min_share)


@given(
    st.integers(1, 6),
    st.sampled_from([0.05, 0.1, 0.3]),
    st.lists(st.floats(0.01, 5.0), min_size=1, max_size=7),
    st.integers(1, 4),
)
def test_the_minimum_share_holds_in_the_long_run(
    batch: int, share: float, services_s: list[float], num_lower: int
) -> None:
    """However long iterations take, a class that always has requests gets its part, up to a few long iterations."""
    policy = classes(share)
    fill(policy, dict.fromkeys(range(num_lower + 1), 8))
    turn = 0

    def service_s(one: Request) -> float:
        nonlocal turn
        turn += 1
        return services_s[turn % len(services_s)]

    had = serve(policy, 400, batch, service_s)
    slack_s = 3 * batch * max(services_s)
    assert all(had[lower] >= share / num_lower * had.total() - slack_s for lower in range(1, num_lower + 1))


@given(st.sampled_from(sorted(POLICIES)), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60))
def test_no_request_is_lost_and_equal_histories_have_equal_orders(name: str, events: list[tuple[int, int]]) -> None:
    """Under every policy each present request is in the order once, and the same calls give the same order again."""

    def run() -> list[str]:
        policy = make_policy(name, TIMES)
        present: list[Request] = []
        for number, (what, which) in enumerate(events):
            now = number / 8
            if what == 0 or not present:
                present.append(request(f"{number}", 1 + which, priority=which % 3))
                policy.add(present[-1], now)
            elif what == 1:
                policy.remove(present.pop(which % len(present)))
            elif what == 2:
                serve_one(policy, present[which % len(present)], which / 4, now)
            order = policy.order(now)
            policy.validate()
            assert Counter(order) == Counter(present)
            starts_s = policy.next_starts_s(order, now, 4)
            assert len(starts_s) == len(order)
            assert all(start_s >= 0.0 for start_s in starts_s)
        return [one.request_id for one in policy.order(len(events))]

    assert run() == run()

"""First tokens first, then the shortest expected remainder, and a bound on overtaking."""

import math
from collections.abc import Mapping

import pytest
from hypothesis import given, strategies as st

from actorserve.core.messages import Attained, FinishReason
from actorserve.core.request import Request
from actorserve.core.scheduling.shortest_expected import ShortestExpected
from tests.core.harness.policy_driver import names, request, run_iteration, serve_one, step_times

TIMES = step_times({1: 1.0, 101: 101.0}, decode_s=1.0)


class Told:
    """A predictor that is told each request's whole length by its id; it knows nothing of others."""

    def __init__(self, lengths: Mapping[str, float] = {}) -> None:
        self.lengths = lengths
        self.ended: list[tuple[str, int]] = []

    def forecast(self, request: Request) -> "_Forecast":
        return _Forecast(self, request.request_id)


class _Forecast:
    def __init__(self, told: Told, name: str) -> None:
        self._told = told
        self._name = name

    def rest(self, num_output: int) -> float | None:
        length = self._told.lengths.get(self._name)
        return None if length is None else max(0.0, length - num_output)

    def ended(self, num_output: int) -> None:
        self._told.ended.append((self._name, num_output))


def policy_of(ageing: float = 1e-6, **lengths: float) -> ShortestExpected:
    return ShortestExpected(TIMES, Told(lengths), ageing=ageing)


def prefilled(policy: ShortestExpected, name: str, now: float = 0.0, max_tokens: int = 500) -> Request:
    """Add a request, and run its prefill of 1 s."""
    one = request(name, 1, max_tokens=max_tokens)
    policy.add(one, now)
    run_iteration(policy, TIMES, one, now, num_tokens=1)
    return one


def test_first_tokens_come_first() -> None:
    """A request without a first token goes by its prefill alone, however long its output will be."""
    policy = policy_of(a=100, b=9, c=50)
    prefilled(policy, "a")
    prefilled(policy, "b")
    policy.add(request("c", 2), 0.0)  # 2 s to its first token
    assert names(policy, 0.0) == "cba"


def test_a_long_prompt_waits_for_a_request_that_soon_ends() -> None:
    """A first token that is farther away than another request's end comes after it."""
    policy = policy_of(a=4)
    prefilled(policy, "a")
    policy.add(request("b", 30), 0.0)
    assert names(policy, 0.0) == "ab"


def test_cached_tokens_bring_a_first_token_nearer() -> None:
    """Tokens whose KV is cached need no prefill."""
    policy = policy_of()
    policy.add(request("a", 9), 0.0)
    policy.add(request("b", 30), 0.0, num_cached_tokens=28)
    assert names(policy, 0.0) == "ba"


def test_without_knowledge_it_is_the_feedback_queue() -> None:
    """An unknown request is expected to have as much left as the level that it would be in gives it: 1, 2, 4 tokens."""
    policy = policy_of()
    one = prefilled(policy, "a")
    rests = []
    for _ in range(15):
        rests.append(round(policy.next_starts_s([one, one], 0.0, 1)[1]))
        run_iteration(policy, TIMES, one, 0.0)
    assert rests == [2, 2, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 16]


def test_a_place_follows_what_is_left() -> None:
    """A request comes forward as it nears its end, in time to go before one that has a quarter more left than it."""
    policy = policy_of(a=101, b=61)
    served, _ = prefilled(policy, "a"), prefilled(policy, "b")
    for _ in range(60):
        run_iteration(policy, TIMES, served, 0.0)
        policy.validate()
    assert names(policy, 0.0) == "ab"  # 40 before 60


def test_recomputing_counts_as_work() -> None:
    """A request whose KV was dropped must compute it again before it comes to its end."""
    policy = policy_of(a=31, b=41)
    a, _ = prefilled(policy, "a"), prefilled(policy, "b")
    for _ in range(19):
        run_iteration(policy, TIMES, a, 0.0)
    assert names(policy, 0.0) == "ab"
    a.num_computed = 1
    serve_one(policy, a, 0.0, 0.0)
    policy.move(a)
    assert names(policy, 0.0) == "ab"  # 19 + 11 before 40
    a.num_computed = 0
    a.token_ids.extend([9] * 9)  # a longer context to recompute, and 2 tokens left
    policy.move(a)
    assert math.isclose(policy.next_starts_s([a, a], 0.0, 1)[1], 30.0 + 2.0)


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 300)), min_size=1, max_size=30),
    st.sampled_from([0.05, 0.25, 1.0]),
)
def test_nothing_overtakes_from_too_far_behind(arrivals: list[tuple[int, int]], ageing: float) -> None:
    """A request stands before all requests that came longer than ``rest_s / ageing`` after it."""
    lengths = {f"{number}": float(rest) for number, (_, rest) in enumerate(arrivals)}
    policy = ShortestExpected(TIMES, Told(lengths), ageing=ageing)
    rests: dict[str, float] = {}
    came: dict[str, int] = {}
    now = 0
    for number, (gap, rest) in enumerate(arrivals):
        now += gap
        one = prefilled(policy, f"{number}", now)
        came[one.request_id], rests[one.request_id] = now, max(1.0, rest - 1)
    order = [one.request_id for one in policy.order(now)]
    for place, overtaken in enumerate(order):
        for name in order[:place]:
            assert came[name] - came[overtaken] <= rests[overtaken] / ageing + 1e-6


def test_waiting_is_bounded_whatever_comes() -> None:
    """With new requests without end, more than the engine can serve, a long request ends within a known time.

    It has 40 s of work, and a second of age outweighs 0.1 s. So the requests that come in the first 400 s may overtake
    it, and no others: one every second, of 2 s each.
    """
    policy = ShortestExpected(TIMES, Told({"long": 40.0}), ageing=0.1)
    long = request("long", 1, max_tokens=40)
    policy.add(long, 0.0)
    now, num_come = 0.0, 0
    while long.num_output < 40 and now < 2000.0:
        while num_come <= now:
            policy.add(request(f"{num_come}", 1, max_tokens=2), float(num_come))
            num_come += 1
        now = run_iteration(policy, TIMES, policy.order(now)[0], now)
    assert 600.0 < now <= 400.0 * 2.0 + 40.0


def test_service_moves_few_requests() -> None:
    """A request's place is found anew only after a quarter of what it had left, so 500 tokens move it a few times."""
    policy = policy_of(a=500)
    one = prefilled(policy, "a")
    num_moves = 0
    for _ in range(499):
        one.num_computed += 1
        one.append(9, None)
        moving = policy.on_service([one], 1.0, 0.0)
        num_moves += len(moving)
        for found in moving:
            policy.move(found)
    assert num_moves <= 30


def test_what_is_known_travels() -> None:
    """Another instance's policy, which knows nothing of a request, goes by what its last owner expected and its age."""
    policy = policy_of(a=100)
    one = prefilled(policy, "a")
    attained = policy.attained(one, 25.0)
    assert attained == Attained(age_s=25.0, expected_tokens=100.0)
    other = policy_of(ageing=0.5)
    other.add(one, 1000.0, one.num_computed, attained)
    assert other.next_starts_s([one, one], 1000.0, 1)[1] == 99.0
    assert other.attained(one, 1001.0) == Attained(age_s=26.0, expected_tokens=100.0)
    young = request("b", 1, max_tokens=500)
    young.num_computed = 1
    young.append(9, None)
    other.add(young, 1000.0, 1, Attained(expected_tokens=87.0))
    assert names(other, 1000.0) == "ba"  # 86 s and its age of 0 before 99 s less half of 25
    other.remove(young)
    other.add(young, 1000.0, 1, Attained(expected_tokens=89.0))
    assert names(other, 1000.0) == "ab"


def test_only_what_has_ended_is_learned() -> None:
    """A request that moved, failed or lost its client says nothing about lengths."""
    told = Told()
    policy = ShortestExpected(TIMES, told)
    for name, reason in zip("abcde", (*FinishReason, None), strict=True):
        one = request(name, 1)
        policy.add(one, 0.0)
        one.append(9, None)
        one.finish_reason = reason
        policy.remove(one)
    assert told.ended == [("a", 1), ("b", 1)]


def test_ageing_must_be_positive() -> None:
    """Without ageing long requests would starve."""
    with pytest.raises(ValueError, match="ageing is 0; expected a number above 0"):
        ShortestExpected(TIMES, Told(), ageing=0.0)

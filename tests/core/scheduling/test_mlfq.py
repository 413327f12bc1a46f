"""The skip-join queue: FastServe's worked example, each rule of Algorithm 1, and a literal copy to compare with."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from actorserve.core.messages import Attained
from actorserve.core.scheduling.baselines import NaiveMLFQ, ShortestRemainingTime
from actorserve.core.scheduling.mlfq import MultiLevelQueue, SkipJoinMLFQ
from actorserve.core.scheduling.policy import FirstComeFirstServed, SchedulingPolicy
from tests.core.harness.policy_driver import latencies_s, names, request, run_iteration, serve_one, step_times

EXAMPLE = step_times({2: 0.5, 3: 1.0, 4: 2.5}, decode_s=0.5)
TIMES = step_times({1: 1.0, 101: 101.0}, decode_s=1.0)
"""An iteration takes 1 s for each prefill token, or 1 s of decodes: quanta are 1, 2, 4, ... s."""


@pytest.mark.parametrize(
    ("policy", "mean_s"),
    [
        (FirstComeFirstServed(), 13 / 3),
        (NaiveMLFQ(EXAMPLE, first_quantum_s=1.0, promote_after_s=math.inf), 5),
        (SkipJoinMLFQ(EXAMPLE, first_quantum_s=1.0, promote_after_s=math.inf), 10 / 3),
        (ShortestRemainingTime(EXAMPLE), 3),
    ],
)
def test_the_papers_worked_example(policy: SchedulingPolicy, mean_s: float) -> None:
    """FastServe's Figure 7: mean latencies of 4.33 s, 5 s, 3.33 s and 3 s, with quanta of 1, 2, 4 and 8 s."""
    ended = latencies_s(policy, EXAMPLE, [request("1", 4), request("2", 3), request("3", 2)])
    assert sum(ended.values()) / 3 == mean_s


def test_a_new_request_joins_the_first_level_that_its_prefill_fits() -> None:
    """Prompts of 1, 2, 3 and 4 s join levels of 1, 2, 4 and 4 s, whatever these hold already."""
    policy = SkipJoinMLFQ(TIMES)
    made = [request(name, tokens) for name, tokens in zip("dcba", (4, 3, 2, 1), strict=True)]
    for one in made:
        policy.add(one, 0.0)
    assert [policy.attained(one, 0.0).quantum_s for one in made] == [4.0, 4.0, 2.0, 1.0]
    assert names(policy, 0.0) == "abdc"


def test_the_cached_prefix_is_taken_off() -> None:
    """A prompt of 16 s of which 14 s are cached joins the level of 2 s."""
    policy = SkipJoinMLFQ(TIMES)
    one = request("a", 16)
    policy.add(one, 0.0, num_cached_tokens=14)
    assert policy.attained(one, 0.0).quantum_s == 2.0


def test_a_used_up_quantum_demotes_by_as_many_levels_as_the_next_iteration_needs() -> None:
    """A promoted prompt gets a chunk in Q1, and then goes down to where the rest of its prefill fits."""
    policy = SkipJoinMLFQ(TIMES, promote_after_s=10.0)
    one = request("a", 20)
    policy.add(one, 0.0)
    policy.order(10.0)
    assert policy.attained(one, 10.0).quantum_s == 1.0
    run_iteration(policy, TIMES, one, 10.0, num_tokens=4)
    assert policy.attained(one, 14.0) == Attained(service_s=4.0, quantum_s=16.0)


def test_a_request_keeps_its_level_while_some_quantum_is_left() -> None:
    """Two decodes of 1 s use up a quantum of 2 s; then the request goes down by one level."""
    policy = SkipJoinMLFQ(TIMES)
    one = request("a", 3, max_tokens=9)
    policy.add(one, 0.0, attained=Attained(service_s=4.0, quantum_s=2.0))
    one.num_computed = 2
    now = run_iteration(policy, TIMES, one, 0.0)
    assert policy.attained(one, now) == Attained(service_s=5.0, quantum_s=2.0, quantum_used_s=1.0)
    now = run_iteration(policy, TIMES, one, now)
    assert policy.attained(one, now) == Attained(service_s=6.0, quantum_s=4.0)


def test_a_computed_prompt_takes_its_request_to_the_level_of_its_decodes() -> None:
    """After a prefill of 4 s, which uses up its level's quantum, the next decode fits into Q1; and it counts there."""
    policy = SkipJoinMLFQ(TIMES)
    one, other = request("a", 4, max_tokens=9), request("b", 2)
    policy.add(one, 0.0)
    now = run_iteration(policy, TIMES, one, 0.0)
    assert policy.attained(one, now) == Attained(service_s=4.0, quantum_s=1.0)
    policy.add(other, now)
    assert names(policy, now) == "ab"  # not behind the newcomer
    now = run_iteration(policy, TIMES, one, now)
    assert policy.attained(one, now) == Attained(service_s=5.0, quantum_s=2.0)


def test_the_chunk_before_the_last_one_moves_no_request() -> None:
    """A request goes up when its whole prompt has been computed, and not before."""
    policy = SkipJoinMLFQ(TIMES)
    one = request("a", 8, max_tokens=9)
    policy.add(one, 0.0)
    run_iteration(policy, TIMES, one, 0.0, num_tokens=6)
    assert policy.attained(one, 6.0).quantum_s == 8.0
    run_iteration(policy, TIMES, one, 6.0)
    assert policy.attained(one, 8.0).quantum_s == 1.0


def test_an_iteration_that_is_hardly_longer_than_a_quantum_fits_it() -> None:
    """The shortest prefill takes a little longer than a decode, and a new request joins Q1 all the same."""
    times = step_times({1: 1.04, 2: 1.06}, decode_s=1.0)
    policy = SkipJoinMLFQ(times)
    short, longer = request("a", 1), request("b", 2)
    for one in (short, longer):
        policy.add(one, 0.0)
    assert [policy.attained(one, 0.0).quantum_s for one in (short, longer)] == [1.0, 2.0]


def test_equal_iterations_use_a_quantum_up_in_spite_of_rounding() -> None:
    """Ten times 0.1 s is a whole second, though the sum of the floats is less."""
    queue: MultiLevelQueue[str] = MultiLevelQueue(1.0)
    queue.join("a", 0.0, 0.0)
    assert [queue.serve(["a"], 0.1, 0.0) for _ in range(10)] == [[]] * 9 + [["a"]]


def test_demotion_goes_to_the_back_and_keeps_the_order_of_a_batch() -> None:
    """A demoted request stands behind all that were in the level; the requests of one batch keep their order."""
    policy = SkipJoinMLFQ(TIMES, promote_after_s=math.inf)
    made = {name: request(name, 1, max_tokens=99) for name in "abc"}
    for one in made.values():
        policy.add(one, 0.0)
    policy.add(request("x", 2), 0.0)
    for _ in range(40):
        for one in made.values():
            run_iteration(policy, TIMES, one, 0.0)
        assert names(policy, 0.0).replace("x", "") == "abc"
    assert names(policy, 0.0) == "xabc"


def test_every_order_promotes_and_gives_a_fresh_quantum() -> None:
    """At its promotion time, no sooner and no later, a request is in Q1 with a fresh quantum, wherever it was."""
    policy = SkipJoinMLFQ(TIMES, promote_after_s=0.3)
    one = request("a", 60, max_tokens=9)
    policy.add(request("b", 1, max_tokens=9), 0.0)
    policy.add(one, 0.0)
    run_iteration(policy, TIMES, one, 0.0, num_tokens=8)
    policy.order(8.29)
    assert policy.attained(one, 8.29).quantum_used_s == 8.0
    assert policy.next_change_s(8.29) == 8.0 + 0.3
    assert names(policy, 8.3) == "ba"
    assert policy.attained(one, 8.3) == Attained(service_s=8.0, quantum_s=1.0, waited_s=8.3 - 8.0)


def test_a_promotion_in_the_first_level_keeps_the_place() -> None:
    """A request that waits in Q1 is not put behind requests that joined Q1 later."""
    policy = SkipJoinMLFQ(TIMES, promote_after_s=0.3)
    policy.add(request("a", 1), 0.0)
    policy.add(request("b", 1), 0.2)
    assert names(policy, 0.35) == "ab"


def test_promotions_go_one_after_the_other() -> None:
    """The next request that has waited too long is promoted when the one before it is down again, or gone."""
    policy = SkipJoinMLFQ(TIMES, promote_after_s=0.5)
    a, b, c = (request(name, 4, max_tokens=99) for name in "abc")
    for number, one in enumerate((a, b, c)):
        policy.add(one, 0.1 * number)
    policy.order(5.0)
    assert [policy.attained(one, 5.0).quantum_s for one in (a, b, c)] == [1.0, 4.0, 4.0]
    assert policy.next_starts_s([a, b, c], 5.0, 1) == [0.0, 3.0, 3.0]  # b's promotion has no time yet
    now = 5.0
    while policy.attained(a, now).quantum_s < 4.0:
        now = run_iteration(policy, TIMES, a, now)
    policy.order(now)
    assert [policy.attained(one, now).quantum_s for one in (a, b, c)] == [4.0, 1.0, 4.0]
    policy.remove(b)
    policy.order(now)
    assert policy.attained(c, now).quantum_s == 1.0


def test_no_request_starves_under_endless_new_ones() -> None:
    """If Q1 always has new requests, long ones are served in turn: a stalled promotion passes its turn on."""
    queue: MultiLevelQueue[str] = MultiLevelQueue(0.01, 0.3, promotes_singly=True)
    served = dict.fromkeys("xyz", 0)
    for name in served:
        queue.join(name, 0.3, 0.0)
    for step in range(3000):
        now = 0.01 * step
        queue.join(f"new{step}", 0.01, now)
        first = queue.order(now)[0]
        if first not in served:
            queue.remove(first)
            continue
        served[first] += 1
        if queue.serve([first], 0.01, now + 0.01):
            queue.demote(first, 0.01)
    assert min(served.values()) >= 20


def test_service_begins_the_waiting_anew() -> None:
    """A request that runs now and then is never promoted; a request that only waits is promoted."""
    policy = SkipJoinMLFQ(TIMES, promote_after_s=1.0)
    runs, waits = request("r", 8), request("w", 8)
    policy.add(runs, 0.0)
    policy.add(waits, 0.0)
    for tenth in range(1, 25):
        serve_one(policy, runs, 0.01, tenth / 10)
        policy.order(tenth / 10)
    assert policy.attained(runs, 2.4).quantum_s == 8.0
    assert policy.attained(waits, 2.4).quantum_s == 1.0
    assert policy.attained(waits, 2.4).waited_s == 2.4


def test_time_waited_elsewhere_counts() -> None:
    """A new request is promoted sooner by what it waited in the cluster, though it joins by its prefill time."""
    policy = SkipJoinMLFQ(TIMES, promote_after_s=0.5)
    one = request("a", 8)
    policy.add(one, 100.0, attained=Attained(waited_s=0.25))
    assert policy.attained(one, 100.0).quantum_s == 8.0
    assert policy.next_change_s(100.0) == 100.25
    policy.order(100.25)
    assert policy.attained(one, 100.25).quantum_s == 1.0


def test_a_level_of_another_instance_becomes_the_first_with_such_a_quantum() -> None:
    """The quantum that a request had elsewhere decides, not its prefill time; the part that it has used stays used."""
    policy = SkipJoinMLFQ(TIMES)
    one = request("a", 1)
    had = Attained(service_s=5.0, quantum_s=3.0, quantum_used_s=2.5, waited_s=0.125)
    policy.add(one, 7.0, attained=had)
    assert policy.attained(one, 7.0) == Attained(service_s=5.0, quantum_s=4.0, quantum_used_s=2.5, waited_s=0.125)


def test_the_requests_of_each_level_are_counted() -> None:
    """Prompts of 1, 1 and 3 s are in the levels of 1 and 4 s, none is in that of 2 s. Some policies have no levels."""
    policy = SkipJoinMLFQ(TIMES)
    assert policy.num_by_level() == [0]
    made = [request(name, tokens) for name, tokens in zip("abc", (1, 1, 3), strict=True)]
    for one in made:
        policy.add(one, 0.0)
    assert policy.num_by_level() == [2, 0, 1]
    policy.remove(made[0])
    assert policy.num_by_level() == [1, 0, 1]
    assert ShortestRemainingTime(TIMES).num_by_level() == FirstComeFirstServed().num_by_level() == ()


def test_the_queue_takes_items_of_any_kind() -> None:
    """Names join by what they need, wait, and leave, as in the coordinator."""
    queue: MultiLevelQueue[str] = MultiLevelQueue(0.01, promote_after_s=1.0)
    for number, name in enumerate(("long", "short", "gone")):
        queue.join(name, 1.0 / (number + 1) ** 3, now=float(number) / 4)
    queue.remove("gone")
    assert len(queue) == 2
    assert queue.order(0.5) == ["short", "long"]
    assert queue.attained("short", 0.5).waited_s == 0.25
    assert queue.order(1.0) == ["long", "short"]


def test_an_order_stays_as_it_was_given() -> None:
    """Later changes of the queue do not change a list that a caller still walks."""
    queue: MultiLevelQueue[str] = MultiLevelQueue(1.0)
    for name in "abc":
        queue.join(name, 0.0, 0.0)
    order = queue.order(0.0)
    queue.remove("b")
    queue.demote("a", 0.0)
    assert order == ["a", "b", "c"]
    assert queue.order(0.0) == ["c", "a"]


@pytest.mark.parametrize("quantum_s", [0.0, -1.0, math.nan, math.inf])
def test_a_first_quantum_must_be_a_time(quantum_s: float) -> None:
    """Doubling it would make no levels."""
    with pytest.raises(ValueError, match=r"first quantum is .* s; expected a time above 0"):
        MultiLevelQueue[str](quantum_s)


def test_a_profile_without_a_shortest_iteration_is_refused() -> None:
    """Its decode of 0 s would be the first quantum."""
    with pytest.raises(ValueError, match=r"first quantum is 0\.0 s"):
        SkipJoinMLFQ(step_times({1: 1.0}, decode_s=0.0))


@pytest.mark.parametrize("promote_after_s", [0.0, -0.3, math.nan])
def test_a_promotion_time_must_be_a_time(promote_after_s: float) -> None:
    """Without a time above 0 s every request would always be in Q1."""
    with pytest.raises(ValueError, match=r"promote_after_s is .*; expected a time above 0 s"):
        MultiLevelQueue[str](1.0, promote_after_s)


# --- Algorithm 1, word by word ---------------------------------------------------------------------------------------

ALPHA_S = 2.0


@dataclass
class _Job:
    level: int
    number: int
    waiting_since: float
    starving_since: float
    used: float = 0.0


class LiteralMLFQ:
    """Algorithm 1 with plain lists, scanning every job each time."""

    def __init__(self) -> None:
        self.queues: list[list[str]] = [[] for _ in range(16)]
        self.quanta = [2.0**k for k in range(16)]
        self.jobs: dict[str, _Job] = {}

    def fitting(self, needed: float) -> int:
        return min(i for i, quantum in enumerate(self.quanta) if 1.05 * quantum >= needed)

    def join(self, name: str, needed: float, now: float, had: Attained) -> None:
        since = now - had.waited_s
        job = _Job(self.fitting(had.quantum_s or needed), len(self.jobs), since, since, had.quantum_used_s)
        self.jobs[name] = job
        self.queues[job.level].append(name)

    def move(self, name: str, level: int) -> None:
        self.queues[self.jobs[name].level].remove(name)
        self.queues[level].append(name)
        self.jobs[name].level = level
        self.jobs[name].used = 0.0

    def serve(self, name: str, service: float, next_iteration: float, now: float) -> None:
        job = self.jobs[name]
        job.used += service
        job.waiting_since = job.starving_since = now
        if job.used >= self.quanta[job.level]:
            self.move(name, max(job.level + 1, self.fitting(next_iteration)))

    def order(self, now: float) -> list[str]:
        present = [name for queue in self.queues for name in queue]
        starved = [name for name in present if now - self.jobs[name].starving_since >= ALPHA_S]
        for name in sorted(starved, key=lambda name: (self.jobs[name].starving_since, self.jobs[name].number)):
            if self.jobs[name].level:
                self.move(name, 0)
            self.jobs[name].used = 0.0
            self.jobs[name].starving_since = now
        return [name for queue in self.queues for name in queue]

    def enst(self, name: str, now: float, batch: int) -> float:
        job = self.jobs[name]
        above = [name for queue in self.queues[: job.level] for name in queue]
        work = sum(sum(self.quanta[self.jobs[name].level : job.level]) for name in above)
        return min(job.starving_since + ALPHA_S - now, work / batch)


sixteenths = st.integers(0, 40).map(lambda n: n / 16)  # exact in floats, and so is every sum of them
events = st.lists(
    st.one_of(
        st.tuples(st.just("join"), sixteenths, st.sampled_from([Attained(), Attained(1.0, 3.0, 0.5, 1.0)])),
        st.tuples(st.just("serve"), st.integers(0, 9), st.tuples(sixteenths, sixteenths)),
        st.tuples(st.just("remove"), st.integers(0, 9), st.none()),
        st.tuples(st.just("wait"), sixteenths, st.none()),
        st.tuples(st.just("order"), st.just(0), st.none()),
    ),
    max_size=60,
)


@given(events, st.sampled_from([1, 2, 4, 8]))
def test_it_does_what_algorithm_1_says(happened: list[tuple[str, float, object]], batch: int) -> None:
    """Order, ENST, next promotion and attained service equal those of a copy that is written word by word.

    Every present item stands in the order once.
    """
    queue: MultiLevelQueue[str] = MultiLevelQueue(1.0, ALPHA_S)
    literal = LiteralMLFQ()
    now, present = 0.0, list[str]()
    for what, number, more in [*happened, ("order", 0, None)]:
        queue.validate()
        if what == "join":
            assert isinstance(more, Attained)
            present.append(f"{len(literal.jobs)}")
            queue.join(present[-1], number, now, more)
            literal.join(present[-1], number, now, more)
        elif what == "wait":
            now += number
        elif what == "order":
            order = queue.order(now)
            assert sorted(order) == sorted(present)
            assert order == literal.order(now)
            assert queue.next_starts_s(order, now, batch) == [literal.enst(name, now, batch) for name in order]
            promotions = [literal.jobs[name].starving_since + ALPHA_S for name in present]
            assert queue.next_change_s(now) == min(promotions, default=None)
        elif present:
            name = present[int(number) % len(present)]
            if what == "remove":
                present.remove(name)
                queue.remove(name)
                literal.queues[literal.jobs[name].level].remove(name)
            else:
                assert isinstance(more, tuple)
                service, next_iteration = more
                if queue.serve([name], service, now):
                    queue.demote(name, next_iteration)
                literal.serve(name, service, next_iteration, now)
    for name in present:
        job, had = literal.jobs[name], queue.attained(name, now)
        assert (had.quantum_s, had.quantum_used_s) == (literal.quanta[job.level], job.used)
        assert had.waited_s == now - job.waiting_since
        elsewhere: MultiLevelQueue[str] = MultiLevelQueue(1.0, ALPHA_S)
        elsewhere.join(name, 0.0, 1000.0, had)
        assert elsewhere.attained(name, 1000.0) == had


def test_requests_that_come_and_go_leave_nothing_behind() -> None:
    """Promotions that were due far in the future do not pile up for requests that ended."""
    queue: MultiLevelQueue[int] = MultiLevelQueue(1.0, promote_after_s=1e9)
    for number in range(1000):
        queue.join(number, 0.0, 0.0)
        queue.remove(number)
    assert len(queue._promotions) <= 65

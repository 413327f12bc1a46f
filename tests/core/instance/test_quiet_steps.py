"""Quiet steps: many iterations at once leave an instance in the same state as one by one."""

from dataclasses import replace

from hypothesis import given, settings, strategies as st

from actorserve.core.effects import Effect, Send
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.messages import Finished, MigrateTo, Peer, PeerUp, Release, Role, Start, Tick, Tokens
from actorserve.core.scheduling.policies import make_policy
from actorserve.core.timing.step_times import StepTimes
from tests.core.harness.driver import CONFIG, PROFILE, Instance, spec

QUIET = replace(CONFIG, num_blocks=64, max_context_tokens=200, max_batch_tokens=40, prefix_cache=False, retry_s=1e9)
STEP_S = 0.01
REQUESTS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 90), st.integers(0, 2)),  # prompt, output, priority
    min_size=1,
    max_size=5,
)


def make(policy: str, config: InstanceConfig) -> Instance:
    """An instance whose policy and scheduler share one StepTimes."""
    times = StepTimes(PROFILE)
    return Instance(config, make_policy(policy, times), times)


def outputs(effects: list[Effect]) -> dict[str, list[tuple[int, int, int]]]:
    """By request: its tokens, as (epoch, position, token)."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for effect in effects:
        if isinstance(effect, Send) and isinstance(effect.message, Tokens):
            tokens = effect.message
            lengths = tokens.run_lengths or (1,) * len(tokens.request_ids)
            left = iter(tokens.token_ids)
            for request_id, epoch, first, length in zip(
                tokens.request_ids, tokens.epochs, tokens.positions, lengths, strict=True
            ):
                run = [(epoch, position, next(left)) for position in range(first, first + length)]
                found.setdefault(request_id, []).extend(run)
            assert next(left, None) is None
    return found


def plan_in_flight(instance: Instance) -> object:
    """Without its tokens. A plan that was made ahead does not name those of the iteration before."""
    return instance.plan and replace(instance.plan, token_ids=())


@given(
    requests=REQUESTS,
    policy=st.sampled_from(["skip_join_mlfq", "shortest_expected", "fcfs", "srpt", "naive_mlfq"]),
    num_host_blocks=st.sampled_from([0, 16]),
    num_blocks=st.sampled_from([24, 64]),
    shares=st.lists(st.floats(0.1, 1.0), min_size=1, max_size=8),
    slowness=st.sampled_from([1.0, 1.7]),
    run_ahead=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_quiet_steps_equal_single_ones(
    requests: list[tuple[int, int, int]],
    policy: str,
    num_host_blocks: int,
    num_blocks: int,
    shares: list[float],
    slowness: float,
    run_ahead: bool,
) -> None:
    """Tokens, the plan in flight, the order, attained service and the load report are the same."""
    config = replace(QUIET, num_host_blocks=num_host_blocks, num_blocks=num_blocks, run_ahead=run_ahead)
    one, many = make(policy, config), make(policy, config)
    for instance in (one, many):
        for number, (num_prompt, max_tokens, priority) in enumerate(requests):
            instance.start(replace(spec(f"r{number}", num_prompt, max_tokens), priority=priority))
    now = 0.0
    turn = 0
    while one.state.requests:
        while one.copies:
            assert one.copied(now) == many.copied(now)
        num_quiet = many.state.quiet_steps.count()
        num_steps = max(1, int(num_quiet * shares[turn % len(shares)])) if num_quiet else 0
        turn += 1
        if num_steps:
            ends = [(now + STEP_S * (step + 1), slowness * STEP_S) for step in range(num_steps)]
            singly = []
            for end_s, duration_s in ends:
                singly += one.plan_ahead(end_s)
                singly += one.done(9, end_s, duration_s)
            at_once = many.advance(ends, 9)
            assert outputs(singly) == outputs(at_once)
            assert plan_in_flight(one) == plan_in_flight(many)
            now = ends[-1][0]
        else:
            now += STEP_S
            assert one.plan_ahead(now) == many.plan_ahead(now)
            assert one.done(9, now, STEP_S) == many.done(9, now, STEP_S)
        left, right = one.state, many.state
        assert left.load_report() == right.load_report()
        assert [r.request_id for r in left.policy.order(now)] == [r.request_id for r in right.policy.order(now)]
        for request_id, request in left.requests.items():
            same = right.requests[request_id]
            assert left.policy.attained(request, now) == right.policy.attained(same, now)
            assert (request.blocks, request.token_ids, request.owed_s) == (same.blocks, same.token_ids, same.owed_s)
    assert not many.state.requests


def test_nothing_is_quiet_while_something_is_decided() -> None:
    """Prefills, waiting requests and stop tokens keep steps single; else all except the very last are quiet."""
    instance = make("skip_join_mlfq", QUIET)
    assert instance.state.quiet_steps.count() == 0
    instance.start(spec("a", 50, max_tokens=10))
    assert instance.state.quiet_steps.count() == 0  # it is being prefilled
    instance.done()
    instance.done()
    assert instance.state.quiet_steps.count() == 8  # the first token is made, and the tenth is the last
    instance.start(spec("b", 4))
    assert instance.state.quiet_steps.count() == 0  # b waits
    instance = make("fcfs", QUIET)
    instance.start(spec("c", 4, max_tokens=10, stop_token_ids=(3,)))
    instance.done()
    assert instance.state.quiet_steps.count() == 0  # any token may be its last


def test_requests_end_in_quiet_steps() -> None:
    """All steps are quiet up to the last end, because lengths are known. The gateway hears of each end at once."""
    instance = make("fcfs", QUIET)
    for name, max_tokens in (("a", 4), ("b", 8)):
        instance.start(spec(name, 4, max_tokens))
        instance.done()
    instance.done()  # a has three tokens, b has one, and the step in flight makes one more of each
    assert instance.state.quiet_steps.count() == 6
    assert instance.state.quiet_steps.endings() == [(0, 8, "a"), (6, 12, "b")]
    instance.advance([(0.01, 0.01)], 9)
    assert [message.request_id for message in instance.sent if isinstance(message, Finished)] == ["a"]
    assert list(instance.state.requests) == ["b"]


def test_a_first_token_is_not_held_back() -> None:
    """A prompt's last chunk may have one token, as a decode has. Its step is single, because its client waits."""
    instance = make("fcfs", QUIET)
    instance.start(spec("a", 41, max_tokens=10))  # an iteration holds 40 tokens
    instance.done()
    assert instance.state.quiet_steps.count() == 0
    instance.done()
    assert instance.state.quiet_steps.count() == 8


def test_reports_and_releases_leave_a_run_open() -> None:
    """A load report tells the same as after single steps, and requests need not learn of their tokens first."""
    one, many = make("fcfs", QUIET), make("fcfs", QUIET)
    for instance in (one, many):
        instance.handle(PeerUp(Peer("coordinator", 1), Role.COORDINATOR))
        for name, max_tokens in (("a", 8), ("b", 30)):
            instance.start(spec(name, 4, max_tokens))
            instance.done()
        instance.done()
    ends = [(0.05 * step, 0.01) for step in range(1, 13)]
    for end_s, duration_s in ends:
        one.done(9, end_s, duration_s)
    singly = one.handle(Tick(), 0.61)
    for place in (0, 1, 2):
        many.state.quiet_steps.advance(ends[4 * place : 4 * place + 4], 9)
    assert many.state.handle_quietly(Release("a", 1), 0.61) == []
    one.handle(Release("a", 1), 0.61)
    at_once = many.state.handle_quietly(Tick(), 0.61)
    assert at_once == [effect for effect in singly if isinstance(effect, Send)]
    assert len(many.state.requests["b"].token_ids) < len(one.state.requests["b"].token_ids)
    many.state.quiet_steps.stop()
    assert many.state.requests["b"].token_ids == one.state.requests["b"].token_ids
    assert many.state.handle_quietly(Start(1, spec("c", 4)), 0.61) is None


def test_nothing_is_quiet_while_a_request_may_move() -> None:
    """A MigrateTo is reconsidered after each step while it is valid and its destination is known."""
    instance, other = make("fcfs", QUIET), Peer("worker-1", 1)
    instance.start(spec("a", 4, max_tokens=10))
    instance.done()
    order = MigrateTo(other, 1, 5.0)  # of one byte: no request is so small
    instance.handle(order)
    assert instance.state.quiet_steps.count() == 8  # the destination is not known yet
    instance.handle(PeerUp(other, Role.WORKER))
    assert instance.state.quiet_steps.count() == 0
    instance.handle(replace(order, num_bytes=0))
    assert instance.state.quiet_steps.count() == 8

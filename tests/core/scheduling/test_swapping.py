"""Swapping: which requests give up device blocks, what is copied when, and that no request is lost."""

from dataclasses import replace

import pytest

from actorserve.core.effects import SwapIn, SwapOut
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.messages import Attained, Release
from actorserve.core.scheduling.policies import make_policy
from actorserve.core.scheduling.swapping import SwapMode
from actorserve.core.timing.profile import Curve, Link, Profile
from actorserve.core.timing.step_times import StepTimes
from tests.core.harness.driver import CONFIG, PROFILE, Instance, spec

# A copy takes almost no time, so that swapping is always cheaper than computing again.
FAST = replace(PROFILE, swap=Link(0.0, 1e12))
# Likewise, and a prefill takes hardly longer than a tenth of a decode.
QUICK = replace(FAST, prefill=Curve((1, 1001), (0.01, 0.02)), decode=Curve((1,), (0.1,)))
SWAPPING = replace(CONFIG, num_host_blocks=8, max_batch_tokens=64, prefix_cache=False)


def make(config: InstanceConfig = SWAPPING, profile: Profile = FAST, policy: str = "fixed_priority") -> Instance:
    """An instance whose default policy runs short prompts before long ones."""
    times = StepTimes(profile)
    return Instance(config, make_policy(policy, times), times)


def with_new_request(config: InstanceConfig = SWAPPING, profile: Profile = FAST) -> Instance:
    """``long`` holds 7 of 8 blocks and has two tokens when ``short`` comes and needs 3; the next step is planned."""
    instance = make(config, profile)
    instance.start(spec("long", 24, max_tokens=6))
    instance.done()
    instance.done()
    instance.start(spec("short", 12, max_tokens=2))
    instance.done()
    return instance


def mode(swap_mode: SwapMode, num_host_blocks: int = 8) -> InstanceConfig:
    return replace(SWAPPING, swap_mode=swap_mode, num_host_blocks=num_host_blocks)


def running(instance: Instance) -> tuple[str, ...]:
    return () if instance.plan is None else instance.plan.request_ids


def finish(instance: Instance) -> None:
    """Let all requests end."""
    while instance.state.requests:
        if instance.copies:
            instance.copied()
        else:
            instance.done()


@pytest.mark.parametrize("swap_mode", [SwapMode.PROACTIVE, SwapMode.REACTIVE])
def test_the_less_urgent_is_swapped_out_and_comes_back(swap_mode: SwapMode) -> None:
    """A new request starts when the copy that makes its room is done; the other continues without recomputing."""
    instance = with_new_request(mode(swap_mode))
    long = instance.state.requests["long"]
    assert instance.copies == [SwapOut(1, (0, 1, 2, 3, 4, 5, 6), (0, 1, 2, 3, 4, 5, 6))]
    assert running(instance) == ()
    instance.copied()
    assert running(instance) == ("short",)
    assert (long.blocks, long.host_blocks, long.num_computed) == ([], [0, 1, 2, 3, 4, 5, 6], 26)
    finish(instance)
    assert instance.state.memory.num_swap_outs == 1
    assert instance.state.batcher.num_preemptions == 1
    assert list(long.token_ids) == [*range(24), 9, 9, 9, 9, 9, 9]
    assert [effect for effect in instance.copies if isinstance(effect, SwapIn)] == []


def test_recompute_copies_nothing() -> None:
    """The less urgent request is dropped, and later computed again, even if there is a host pool."""
    instance = with_new_request(mode(SwapMode.RECOMPUTE))
    assert instance.copies == []
    assert running(instance) == ("short",)
    assert instance.state.requests["long"].num_computed == 0
    finish(instance)
    assert instance.state.memory.num_swap_outs == 0


@pytest.mark.parametrize("num_host_blocks", [0, 6])
def test_no_kv_is_lost_for_an_admission(num_host_blocks: int) -> None:
    """If its KV does not fit on the host, a long request is not evicted for a new one; a pool of 0 blocks works."""
    instance = with_new_request(mode(SwapMode.PROACTIVE, num_host_blocks=num_host_blocks))
    assert instance.copies == []
    assert running(instance) == ("long",)
    finish(instance)
    assert instance.state.batcher.num_preemptions == 0


def test_kv_that_is_computed_again_for_almost_nothing_may_be_lost() -> None:
    """A request of 10 tokens is evicted for a more urgent one, though there is no host pool."""
    instance = make(replace(SWAPPING, num_blocks=3, num_host_blocks=0))
    instance.start(spec("few", 10, max_tokens=2))
    instance.start(spec("fewer", 4, max_tokens=2))
    instance.done()
    assert running(instance) == ("fewer",)
    assert instance.state.requests["few"].num_computed == 0
    finish(instance)
    assert instance.state.batcher.num_preemptions == 1


def with_full_host(profile: Profile) -> Instance:
    """``long`` lies in 7 of the host's 8 blocks, and ``middle`` holds 6 of the device's 8, when ``short`` comes, which
    needs 3; the next step is planned.
    """
    instance = make(profile=profile)
    instance.start(spec("long", 24, max_tokens=6))
    instance.done()
    instance.done()
    instance.start(spec("middle", 20, max_tokens=6))
    instance.done()
    instance.copied()
    instance.done()
    instance.start(spec("short", 12, max_tokens=2))
    instance.done()
    return instance


def test_the_last_give_up_their_kv_on_a_full_host() -> None:
    """A new request starts though the host is full, if computing the KV of the request ranked last costs little: that
    KV is dropped, and the KV of the request in its way is copied in its place.
    """
    instance = with_full_host(QUICK)
    long, middle, short = (instance.state.requests[name] for name in ("long", "middle", "short"))
    assert not long.is_started
    assert len(middle.host_blocks) == 6
    finish(instance)
    assert short.num_output == 2


def test_the_last_keep_their_kv_if_it_costs_much_to_compute() -> None:
    """A new request waits while the host is full, because a prefill takes longer than an eighth of the decodes that the
    request ranked last has had.
    """
    instance = with_full_host(FAST)
    assert instance.state.requests["long"].is_swapped
    assert running(instance) == ("middle",)
    finish(instance)


def test_nothing_is_evicted_if_that_does_not_make_enough_room() -> None:
    """Only ``last`` could give way to ``large``, and has too few blocks, so that it keeps them."""
    instance = make(policy="srpt")
    instance.start(spec("first", 16, max_tokens=3))
    instance.start(spec("last", 4, max_tokens=20))
    instance.done()
    instance.start(spec("large", 20, max_tokens=1))
    instance.done()
    assert [one.request_id for one in instance.state.batcher.order] == ["first", "large", "last"]
    assert set(running(instance)) == {"first", "last"}
    assert instance.state.batcher.num_preemptions == 0
    finish(instance)


def test_a_request_that_does_not_fit_is_passed_within_bounds() -> None:
    """Small requests run while a large one waits for room, until they have got as many blocks as it wants: 5."""
    instance = make(replace(SWAPPING, num_host_blocks=0, max_batch_requests=16), policy="srpt")
    instance.start(spec("holder", 16, max_tokens=15))
    instance.done()
    instance.start(spec("large", 20, max_tokens=1))
    small = [f"small{number}" for number in range(8)]
    for name in small:
        instance.start(spec(name, 2, max_tokens=3))
    ran: set[str] = set()
    while "large" not in running(instance):
        ran |= set(running(instance))
        instance.done()
    assert len(ran & set(small)) == 5
    finish(instance)


def test_computing_lost_kv_again_is_no_service() -> None:
    """A dropped request attains its prompt once, and each decode."""
    instance = make(mode(SwapMode.RECOMPUTE), policy="skip_join_mlfq")
    instance.start(replace(spec("long", 24, max_tokens=6), priority=1))
    policy, long = instance.state.policy, instance.state.requests["long"]
    instance.done()
    instance.done()
    instance.start(spec("short", 12, max_tokens=2))
    while instance.state.batcher.num_preemptions == 0:
        instance.done()
    before_s = policy.attained(long, 0.0).service_s
    while long.num_computed < 26:
        instance.done()
    assert policy.attained(long, 0.0).service_s == pytest.approx(before_s, abs=0.001)  # for the newest token


def test_growth_loses_the_shortest_kv() -> None:
    """A running request that needs a block gets it from the shortest of the requests behind it, without a host pool."""
    instance = make(replace(SWAPPING, num_blocks=15, num_host_blocks=0))
    for name, num_prompt in (("grows", 4), ("shortest", 15), ("longest", 16)):
        instance.start(spec(name, num_prompt, max_tokens=16))
    behind = [instance.state.requests[name] for name in ("shortest", "longest")]
    while instance.state.batcher.num_preemptions == 0:
        num_fed = {one: one.num_fed for one in behind}
        instance.done()
    assert min(num_fed.values()) > 11  # all is dear
    (dropped,) = (one for one in behind if not one.blocks)
    assert num_fed[dropped] == min(num_fed.values()) < max(num_fed.values())
    assert dropped is not instance.state.batcher.order[-1]  # which the last one would be
    finish(instance)


def test_a_request_stays_for_as_long_as_copying_all_memory_takes() -> None:
    """Eight blocks of 100 bytes take 10 ms in each direction, so that a request that came back stays for 20 ms."""
    times = StepTimes(replace(PROFILE, swap=Link(0.0, 80_000.0)))
    instance = Instance(SWAPPING, make_policy("fixed_priority", times), times)
    instance.start(spec("long", 24, max_tokens=6))
    instance.done()
    instance.start(spec("short", 12, max_tokens=2))
    long = instance.state.requests["long"]
    while not instance.copies:
        instance.done()
    instance.copied()
    while not long.blocks:
        instance.done()
    assert long.owed_s == pytest.approx(2 * times.swap_s(800))


def test_the_cheaper_way_is_taken() -> None:
    """If by the profile both copies take longer than a prefill, the request is computed again."""
    slow = replace(PROFILE, swap=Link(1.0, 1e12))
    instance = with_new_request(profile=slow)
    assert instance.copies == []
    assert instance.state.requests["long"].num_computed == 0


def test_steps_go_on_during_a_copy_and_leave_its_blocks_alone() -> None:
    """Under proactive swapping others run during a copy; its blocks are handed out when it is done."""
    instance = make()
    instance.start(spec("long", 16, max_tokens=9))
    instance.start(spec("mid", 8, max_tokens=9))
    instance.done()
    instance.done()
    instance.start(spec("short", 4, max_tokens=9))
    instance.start(spec("tiny", 3, max_tokens=2))
    instance.done()
    assert [type(copy) for copy in instance.copies] == [SwapOut]
    copied = set(instance.copies[0].device_blocks)
    for _ in range(2):
        assert running(instance)
        assert "long" not in running(instance)
        assert instance.plan is not None
        assert not copied & {block for table in instance.plan.block_tables for block in table}
        instance.done()
    instance.copied()
    finish(instance)


@pytest.mark.parametrize("swap_mode", [SwapMode.PROACTIVE, SwapMode.REACTIVE])
def test_a_request_released_during_a_copy_keeps_its_blocks_until_it_is_done(swap_mode: SwapMode) -> None:
    """A request that is released during a copy frees all its blocks when that is done, and none before."""
    instance = with_new_request(mode(swap_mode))
    instance.handle(Release("long", 1))
    memory = instance.state.memory
    assert (memory.device.num_free_blocks, memory.host.num_free_blocks) == (1, 1)
    assert running(instance) == ()
    instance.copied()
    assert running(instance) == ("short",)
    finish(instance)
    assert (memory.device.num_free_blocks, memory.host.num_free_blocks) == (8, 8)


def test_blocks_that_are_still_on_the_device_are_not_copied_back() -> None:
    """Blocks that were not reused are found by their names; only the last, unfinished one comes from the host."""
    instance = make(replace(SWAPPING, prefix_cache=True, num_blocks=10))
    instance.start(spec("long", 24, max_tokens=6))
    instance.done()
    instance.done()
    long = instance.state.requests["long"]
    instance.state.memory.on_step_ended(long.last_step)
    assert instance.state.memory.swap_out(long)
    instance.state.memory.on_copy_done(1)
    instance.state.memory.swap_in(long)
    swap_in = instance.state._effects[-1]
    assert isinstance(swap_in, SwapIn)
    assert len(swap_in.host_blocks) == 1
    assert long.num_computed == 25


def test_a_request_that_has_come_stays_for_a_token() -> None:
    """A request that was just brought to the device is not evicted before it has made progress."""
    instance = make()
    instance.start(spec("a", 20, max_tokens=4))
    a = instance.state.requests["a"]
    assert a.owed_s > 0.0
    instance.start(spec("b", 16, max_tokens=4))
    instance.done()  # a's prefill: its first token pays
    assert a.owed_s <= 0.0
    assert [type(copy) for copy in instance.copies] == [SwapOut]


def test_waiting_for_copies_is_counted_while_a_request_is_due() -> None:
    """A due request in a copy counts from the planning that found it; an idle instance counts nothing."""
    instance = with_new_request(mode(SwapMode.REACTIVE))
    assert instance.state.batcher.blocked_s == 0.0
    instance.copied(now=0.25)
    assert instance.state.batcher.blocked_s == 0.25  # of one request, because short had not started yet
    instance = with_new_request()
    instance.handle(Release("short", 1))
    instance.handle(Release("long", 1))
    instance.copied(now=1.0)
    blocked_s = instance.state.batcher.blocked_s
    instance.start(spec("later", 4))
    instance.handle(Release("later", 1), now=3600.0)
    assert instance.state.batcher.blocked_s == blocked_s


def test_a_chunked_prefill_stays_in_its_level() -> None:
    """The chunks of a prompt add up to its whole prefill, so that no chunk costs it its level."""
    instance = make(replace(SWAPPING, max_batch_tokens=8), policy="skip_join_mlfq")
    instance.start(spec("a", 30, max_tokens=4))
    policy, a = instance.state.policy, instance.state.requests["a"]
    level_s = policy.attained(a, 0.0).quantum_s
    for _ in range(3):
        instance.done()
        assert policy.attained(a, 0.0).quantum_s == level_s
    assert a.num_computed == 24


def test_a_new_request_that_waited_elsewhere_is_promoted_sooner() -> None:
    """What a request attained elsewhere comes with it, so here its promotion is due at once."""
    instance = make(policy="skip_join_mlfq")
    instance.start(spec("a", 20, max_tokens=9))
    policy = instance.state.policy
    request = instance.state.requests["a"]
    instance.state.policy.remove(request)
    instance.state.policy.add(request, 0.0, attained=Attained(waited_s=1.0))
    policy.order(0.0)
    assert policy.attained(request, 0.0).quantum_s == PROFILE.min_iteration_s


def test_reports_tell_what_yields() -> None:
    """The report counts what preempted requests want that leave memory to new ones, and nothing of those that run, or
    cost much to compute again.
    """
    assert with_full_host(QUICK).state.load_report().kv_yielding_bytes == 7 * 100
    assert with_full_host(FAST).state.load_report().kv_yielding_bytes == 0

"""Swapping: which requests give up device blocks, what is copied when, and that no request is lost."""

from dataclasses import replace

import pytest

from actorserve.core.effects import SwapIn, SwapOut
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.messages import Attained, Release
from actorserve.core.scheduling.policies import make_policy
from actorserve.core.scheduling.swapping import ArrivalReserve, SwapMode
from actorserve.core.timing.profile import Link, Profile
from actorserve.core.timing.step_times import StepTimes
from tests.core.harness.driver import CONFIG, PROFILE, Instance, spec

# A copy takes almost no time, so that swapping is always cheaper than computing again.
FAST = replace(PROFILE, swap=Link(0.0, 1e12))
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
def test_a_host_pool_without_room_means_recompute(num_host_blocks: int) -> None:
    """If its KV does not fit on the host, a request is dropped; a pool of 0 blocks works."""
    instance = with_new_request(mode(SwapMode.PROACTIVE, num_host_blocks=num_host_blocks))
    assert instance.copies == []
    assert running(instance) == ("short",)
    finish(instance)


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


def test_the_reserve_follows_bursts() -> None:
    """As many blocks are kept free as recently came within one window; an old burst is forgotten."""
    reserve = ArrivalReserve(0.5)
    assert reserve.num_blocks(0.0) == 0
    for at_s, num_blocks in ((0.1, 3), (0.2, 4), (0.6, 2), (5.0, 6)):
        reserve.on_arrival(num_blocks, at_s)
    assert reserve.num_blocks(5.0) == 7
    assert reserve.num_blocks(0.5 * 65) == 6
    assert reserve.num_blocks(100.0) == 0


def test_a_new_request_that_waited_elsewhere_is_promoted_sooner() -> None:
    """What a request attained elsewhere comes with it, so here its promotion is due at once."""
    instance = make(policy="skip_join_mlfq")
    instance.start(spec("a", 20, max_tokens=9))
    policy = instance.state.policy
    request = instance.state.requests["a"]
    instance.state.policy.remove(request)
    instance.state.policy.add(request, 0.0, attained=Attained(waited_s=0.3))
    policy.order(0.0)
    assert policy.attained(request, 0.0).quantum_s == PROFILE.min_iteration_s

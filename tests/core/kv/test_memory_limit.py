"""Other processes take memory: an instance admits what fits, loses no request, and recovers."""

from dataclasses import replace

from hypothesis import given, settings, strategies as st

from actorserve.core.effects import DropFromEngine, Send
from actorserve.core.kv.block_allocator import BlockAllocator
from actorserve.core.messages import (
    LoadReport,
    MemoryLimit,
    PeerUp,
    RefusalReason,
    Refused,
    Release,
    Role,
    Tick,
)
from tests.core.harness.driver import CONFIG, GATEWAY, Instance, spec
from tests.core.world.world import World

NO_CACHE = replace(CONFIG, prefix_cache=False)


def test_untouched_blocks_are_kept_back_and_touched_ones_are_not() -> None:
    """Below its limit an allocator hands out new blocks; above it only those that were handed out before."""
    allocator = BlockAllocator(8)
    blocks = allocator.allocate(5)
    assert blocks is not None
    allocator.limit(3)
    assert (allocator.num_usable_blocks, allocator.num_free_blocks) == (5, 0)
    allocator.free(blocks[:2])
    assert allocator.allocate(3) is None
    again = allocator.allocate(2)
    assert again is not None
    assert set(again) == set(blocks[:2])
    allocator.limit(6)
    assert allocator.allocate(1) == [5]
    assert allocator.allocate(1) is None
    allocator.limit(100)
    assert (allocator.num_usable_blocks, allocator.num_free_blocks) == (8, 2)


def test_admission_waits_until_memory_comes_back() -> None:
    """A request that finds no room waits, and starts as soon as memory is free."""
    instance = Instance(NO_CACHE)
    instance.handle(MemoryLimit(2))
    instance.start(spec("a", 6))
    instance.start(spec("b", 6))
    assert [request.is_started for request in instance.state.requests.values()] == [True, False]
    instance.handle(MemoryLimit(8))
    instance.done()
    assert [request.is_started for request in instance.state.requests.values()] == [True, True]


def test_a_request_that_cannot_fit_is_given_back() -> None:
    """While memory is short, a request larger than all usable memory is refused, so that it can be placed elsewhere."""
    instance = Instance(NO_CACHE)
    instance.handle(MemoryLimit(3))
    effects = instance.start(spec("big", 20))
    assert Send(GATEWAY, Refused("big", 1, RefusalReason.OVERLOADED, 1.0)) in effects
    assert DropFromEngine("big") in effects
    instance.start(spec("small", 6, max_tokens=1))
    assert instance.plan is not None
    assert instance.plan.request_ids == ("small",)
    assert not instance.state.requests.keys() - {"small"}
    again = Refused("big", 1, RefusalReason.OVERLOADED, 1.0)
    assert Send(GATEWAY, again) in instance.start(spec("big", 20))
    assert Send(GATEWAY, again) in instance.handle(Tick(), now=1.0)
    instance.handle(Release("big", 1))
    assert Send(GATEWAY, again) not in instance.handle(Tick(), now=2.0)


def test_a_started_request_keeps_its_memory() -> None:
    """A started request keeps its blocks under any limit, and is preempted only when it needs a new one."""
    instance = Instance(NO_CACHE)
    instance.start(spec("a", 6, max_tokens=4))
    instance.done()
    instance.handle(MemoryLimit(0))
    instance.done()
    assert instance.state.batcher.num_preemptions == 0
    instance.done()  # the ninth token needs a third block
    assert instance.state.batcher.num_preemptions == 1
    assert instance.plan is None
    assert instance.sent[-1] == Refused("a", 1, RefusalReason.OVERLOADED, 1.0)


def test_load_reports_follow_the_limit() -> None:
    """Load reports show the usable memory, not the pool's size."""
    instance = Instance(NO_CACHE)
    instance.handle(PeerUp(GATEWAY, Role.COORDINATOR))
    instance.start(spec("a", 6, max_tokens=1))
    instance.handle(MemoryLimit(3))
    instance.handle(Tick(), now=0.5)
    instance.done()
    instance.handle(Release("a", 1))
    instance.handle(MemoryLimit(0))
    instance.handle(Tick(), now=1.0)
    reports = [message for message in instance.sent if isinstance(message, LoadReport)]
    assert [(r.kv_total_bytes, r.kv_used_bytes) for r in reports] == [(800, 0), (300, 200), (200, 0)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 14), st.integers(1, 4)), max_size=12))
def test_no_request_is_lost_while_memory_comes_and_goes(changes: list[tuple[int, int]]) -> None:
    """Whatever the limits and whenever they change, blocks are conserved and each answer is complete and the same."""
    world = World(num_workers=1)
    for number in range(6):
        world.open(f"r{number}", tuple(range(number, 3 * number + 2)), max_tokens=14)
    for num_blocks, rounds in changes:
        world.limit_memory("worker-0", num_blocks)
        for _ in range(rounds):
            world.progress()
    world.limit_memory("worker-0", world.num_blocks)
    world.settle()
    assert all(client.tokens == client.expected for client in world.clients.values())
    world.check_at_rest()


def test_a_journal_with_limits_replays() -> None:
    """A worker's journal with memory limits, replayed into a fresh core, gives equal effects."""
    world = World(num_workers=1)
    for number in range(6):
        world.open(f"r{number}", tuple(range(number, 3 * number + 2)), max_tokens=14)
    for num_blocks in (12, 4, 0, 7, 12):
        world.limit_memory("worker-0", num_blocks)
        for _ in range(5):
            world.progress()
    world.settle()
    process = world.processes["worker-0"]
    core = world.make(process.peer).core
    assert any(isinstance(message, MemoryLimit) for _, _, message, _ in process.log)
    for now, sender, message, effects in process.log:
        assert core.handle(message, now, sender) == effects

"""Layers with a window: a request keeps their KV for the window alone, in the same pool as all other KV."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from actorserve.core.effects import Effects
from actorserve.core.kv.block_allocator import BlockAllocator
from actorserve.core.kv.kv_holding import KVHolding
from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.kv.kv_pools import KVPools
from actorserve.core.kv.layer_groups import NO_BLOCK, ONE_GROUP, LayerGroups, Rows
from actorserve.core.kv.prefix_cache import PrefixCache
from actorserve.core.messages import LoadReport, Peer, PeerUp, RequestSpec, Role, RowShape, SamplingParams, Tokens
from tests.core.harness.driver import CONFIG, Instance

GROUPS = LayerGroups(num_full=1, num_windowed=2, window=8)
WINDOWED = replace(CONFIG, layer_groups=GROUPS, num_blocks=120, max_context_tokens=200, max_batch_tokens=16)
TEXT = tuple(range(100, 180))
MAX_WINDOW_ROWS = 14  # (8 + 2 * 16) / 4, and the spare rows


def ask(instance: Instance, name: str, prompt: Sequence[int], max_tokens: int) -> None:
    instance.start(RequestSpec(name, tuple(prompt), SamplingParams(seed=0, max_tokens=max_tokens)))


def run(instance: Instance) -> int:
    """Run until nothing is left to do. Returns the most device blocks that were held at a time."""
    most = 0
    while instance.plan is not None:
        instance.done()
        instance.state.validate()
        most = max(most, instance.state.memory.held_blocks)
    return most


def num_found(instance: Instance, name: str) -> int:
    """How many tokens of this request's prompt the prefix cache had."""
    return sum(
        number
        for message in instance.sent
        if isinstance(message, Tokens)
        for request_id, number in zip(message.request_ids, message.num_cached_tokens, strict=False)
        if request_id == name
    )


@given(st.integers(0, 3), st.integers(1, 5), st.integers(0, 20), st.integers(0, 400))
def test_the_longest_request_fits(num_full: int, num_windowed: int, max_window_rows: int, num_blocks: int) -> None:
    """The blocks of the longest request that a pool holds fit into it, and those of one row more do not."""
    shape = RowShape(num_full, num_windowed, max_window_rows)
    num_rows = shape.max_rows(num_blocks)
    if num_full:
        assert shape.num_blocks(num_rows) <= num_blocks < shape.num_blocks(num_rows + 1)
    else:
        assert shape.num_blocks(num_rows) <= num_blocks


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 9), st.data())
def test_rows_keep_their_places(num_full: int, num_windowed: int, num_rows: int, data: st.DataObject) -> None:
    """Blocks that are placed in rows come out in the same order, less those that are given up."""
    rows = Rows(LayerGroups(num_full, num_windowed, 8), 4, 16)
    first_row = data.draw(st.integers(0, num_rows))
    end_row = data.draw(st.integers(first_row, num_rows))
    blocks = list(range(rows.count(0, num_rows, first_row, end_row)))
    placed = rows.place(list(blocks), 0, num_rows, first_row, end_row)
    assert len(placed) == num_rows * rows.num_groups
    assert rows.held(placed) == rows.span(placed, 0, num_rows, 0) == blocks
    middle = data.draw(st.integers(0, num_rows))
    assert len(rows.span(placed, 0, middle, first_row)) == rows.count(0, middle, first_row, end_row)
    given_up = rows.give_up(placed, first_row, end_row)
    assert sorted(given_up + rows.held(placed)) == blocks
    assert rows.count(0, num_rows, end_row, end_row) == num_rows * num_full == len(rows.held(placed))
    rows.fill(placed, first_row, end_row, given_up)
    assert rows.held(placed) == blocks


@pytest.mark.parametrize("numbers", [(2, 0, 0), (0, 0, 0), (1, 0, 8), (1, 1, 0), (-1, 2, 8), (1, -1, 8)])
def test_layer_groups_that_make_no_sense_are_refused(numbers: tuple[int, int, int]) -> None:
    """Several groups need windows, and a window needs groups."""
    with pytest.raises(ValueError, match="LayerGroups"):
        LayerGroups(*numbers)


def test_without_windows_a_row_is_a_block() -> None:
    """A model without windows has one group, whose requests need a block for each row."""
    rows = Rows(ONE_GROUP, 4, 16)
    assert rows.shape == RowShape()
    assert rows.count(2, 9, 0, 0) == 7
    assert rows.span([5, 6, 7], 1, 3, 0) == [6, 7]


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_request_keeps_its_window(prefix_cache: bool) -> None:
    """Of a long request, layers with a window hold a few rows of KV, and all other layers hold all rows."""
    instance = Instance(replace(WINDOWED, prefix_cache=prefix_cache))
    ask(instance, "long", TEXT, max_tokens=60)
    held: dict[int, int] = {}
    while instance.plan is not None:
        instance.done()
        instance.state.validate()
        for request in instance.state.requests.values():
            held[request.num_computed] = instance.state.memory.num_held(request)
            assert held[request.num_computed] == instance.state.memory.held_blocks
    num_rows = 139 // 4 + 1
    assert held[138] == num_rows + 2 * 4  # two rows that the next token sees, the one before, and the newest
    assert max(held.values()) <= num_rows + 2 * MAX_WINDOW_ROWS
    assert instance.state.memory.device.num_free_blocks == 120


def test_more_requests_fit() -> None:
    """A pool that would hold two requests with all of their KV holds more of them, without a preemption."""
    num_all = 3 * (100 // 4)
    config = replace(WINDOWED, num_blocks=2 * num_all + 10, max_batch_requests=8, prefix_cache=False)
    instance = Instance(config)
    for name in "abc":
        ask(instance, name, TEXT, max_tokens=20)
    assert run(instance) <= config.num_blocks < 3 * num_all
    assert instance.state.batcher.num_preemptions == 0


def test_a_request_that_is_longer_than_the_pool_is_served() -> None:
    """A context counts with what is held at a time, so it may be longer than a pool with all of its KV."""
    config = replace(WINDOWED, num_blocks=75)
    assert config.max_tokens == 4 * (75 - 2 * MAX_WINDOW_ROWS) > 4 * (75 // 3)
    instance = Instance(config)
    ask(instance, "long", TEXT * 2, max_tokens=28)
    run(instance)
    assert len([message for message in instance.sent if isinstance(message, Tokens)]) == 28


def test_a_found_prefix_needs_its_last_window() -> None:
    """A prefix is found as long as the window before its end lies in the pool, and not without that."""
    instance = Instance(WINDOWED)
    ask(instance, "first", TEXT, max_tokens=1)
    run(instance)
    ask(instance, "same", (*TEXT, 1), max_tokens=1)
    run(instance)
    assert num_found(instance, "same") == len(TEXT)
    memory = instance.state.memory
    holding = KVHolding((*TEXT, 1))
    found = memory.prefixes.find(holding)
    assert (found.num_rows, found.first_row) == (20, 18)  # the next token sees 8 tokens: two rows
    names = memory.prefixes.found_names(holding, found)
    assert len(names) == 20 + 2 * 2
    ask(instance, "other", range(300, 475), max_tokens=1)  # takes all blocks that have no content and the oldest ones
    run(instance)
    names = memory.prefixes.found_names(holding, memory.prefixes.find(holding))
    assert all(map(memory.device.has, names))
    shorter = memory.prefixes.find(KVHolding((*TEXT[:40], 1)))
    assert shorter.num_rows < 10, "the windows in the middle were given up first, so they are evicted first"


def test_a_shorter_prefix_is_found_while_its_window_is_cached() -> None:
    """What a request gave up stays in the pool as long as there is room, so a prompt may branch off anywhere."""
    instance = Instance(WINDOWED)
    ask(instance, "first", TEXT, max_tokens=1)
    run(instance)
    ask(instance, "branch", (*TEXT[:41], 1, 2, 3), max_tokens=1)
    run(instance)
    assert num_found(instance, "branch") == 40


class _NoCheckpoints:
    num_blocks = 0

    def make_room(self, num_blocks: int) -> None:
        """Nothing can be freed."""


def _feed(memory: KVMemory, holding: KVHolding, num_tokens: int) -> None:
    """Run an iteration that feeds this holding alone."""
    assert memory.grow(holding)
    holding.last_step = memory.num_ended_steps + 1
    holding.num_ahead += num_tokens
    memory.on_step_ended(holding.last_step)
    holding.num_ahead -= num_tokens
    holding.num_computed += num_tokens
    memory.share_computed(holding, num_tokens)


def test_a_swap_in_finds_more_rows_than_a_window() -> None:
    """A request that was swapped out in its prefill comes back after another one computed the rest of the same prompt:
    it takes what follows its own rows, as far as its window reaches at a time, and each block has its right owners.
    """
    rows = Rows(GROUPS, 4, 8)
    memory = KVMemory(KVPools(400, 200, 4, 1), _NoCheckpoints(), Effects(), rows, prefix_cache=True)
    first, second = KVHolding(range(200)), KVHolding(range(200))
    memory.start(first)
    for _ in range(2):
        _feed(memory, first, 8)
    assert memory.swap_out(first)
    assert first.copy_id is not None
    memory.on_copy_done(first.copy_id)
    memory.start(second)
    while second.num_computed < 200:
        _feed(memory, second, 8)
    first_row, num_wanted, num_free = first.first_row, memory.blocks_wanted(first), memory.device.num_free_blocks
    assert second.num_computed // 4 > first_row + rows.shape.max_window_rows
    memory.swap_in(first)
    assert first.num_computed == 4 * (first_row + rows.shape.max_window_rows)
    memory.validate([first, second], [], [])
    assert num_free - memory.device.num_free_blocks <= num_wanted
    while first.num_computed < 200:
        _feed(memory, first, 4)
    memory.validate([first, second], [], [])
    memory.drop(first)
    memory.drop(second)
    assert memory.device.num_free_blocks == 400


class _CountingAllocator(BlockAllocator):
    """Counts the names that are looked up."""

    num_looked_up = 0

    def has(self, name: bytes) -> bool:
        self.num_looked_up += 1
        return super().has(name)

    def num_owned(self, names: Iterable[bytes]) -> int:
        names = list(names)
        self.num_looked_up += len(names)
        return super().num_owned(names)


@pytest.mark.interpreted("look-ups are counted by a subclass, and compiled classes have no interpreted ones")
def test_a_long_prompt_is_found_with_few_lookups() -> None:
    """Only the window's rows are looked up one by one, because each load report asks for each waiting request."""
    allocator, rows = _CountingAllocator(3 * 1000), Rows(GROUPS, 4, 8)
    cache = PrefixCache(allocator, rows, 4, enabled=True)
    holding = KVHolding(range(4001))
    holding.blocks, holding.num_computed = allocator.allocate(3 * 1000) or [], 4000
    assert cache.share_computed(holding, 4000) == []
    waiting = KVHolding(range(4001))
    found = cache.find(waiting)
    assert (found.num_rows, found.first_row, found.num_owned) == (1000, 998, 1000 + 2 * 2)
    assert allocator.num_looked_up < 50
    allocator.free(holding.blocks)
    assert cache.find(waiting).num_owned == 0
    waiting.num_computed, waiting.first_row = 4, 2
    assert cache.find(waiting).num_rows == 2 + rows.shape.max_window_rows


def test_load_reports_count_what_is_held() -> None:
    """A load report's bytes are those of the blocks that are really held, and it says what longer requests need."""
    instance = Instance(replace(WINDOWED, prefix_cache=False))
    ask(instance, "long", TEXT, max_tokens=60)
    for _ in range(30):
        instance.done()
    coordinator = Peer("coordinator", 1)
    instance.handle(PeerUp(coordinator, Role.COORDINATOR), sender=coordinator)
    (report,) = (message for message in instance.sent if isinstance(message, LoadReport))
    (request,) = instance.state.requests.values()
    num_held = sum(block != NO_BLOCK for block in request.blocks)
    assert num_held < len(request.blocks)
    assert report.kv_used_bytes == report.kv_needed_bytes == num_held * WINDOWED.bytes_per_block
    assert report.row_shape == RowShape(1, 2, MAX_WINDOW_ROWS)

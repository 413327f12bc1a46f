"""Blocks are owned or free, with or without content, and none is ever lost or owned by mistake."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actorserve.core.kv.block_allocator import BlockAllocator, CachedPrefix, rows_for

NUM_BLOCKS = 10
TEXTS = st.text("ab", min_size=1, max_size=5)
"""A letter stands for a full block's tokens; two texts share the blocks of their common beginning."""


@dataclass
class Owner:
    """The owner of a chain of blocks, of which the first ``num_shared`` are computed and shared."""

    text: str
    blocks: list[int]
    num_shared: int

    def name(self, index: int) -> bytes:
        return self.text[: index + 1].encode()


class AllocatorMachine(RuleBasedStateMachine):
    """The allocator, compared with a plain list of all blocks' contents that is searched from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.owners: list[Owner] = []
        self.empty: list[int] = []  # handed out and freed
        self.num_untouched = NUM_BLOCKS  # never handed out
        self.limit = NUM_BLOCKS
        self.cached: list[int] = []  # the longest without an owner first
        self.block_of: dict[bytes, int] = {}

    def _num_owners(self, block: int) -> int:
        return sum(owner.blocks.count(block) for owner in self.owners)

    @property
    def _num_left(self) -> int:
        """Blocks within the limit that were never handed out."""
        return max(0, self.limit - (NUM_BLOCKS - self.num_untouched))

    @property
    def _num_free(self) -> int:
        return len(self.empty) + len(self.cached) + self._num_left

    def _expect_taken(self, num_blocks: int) -> list[int]:
        blocks = []
        for _ in range(num_blocks):
            if self.empty:
                blocks.append(self.empty.pop())
            elif self._num_left > 0:
                blocks.append(NUM_BLOCKS - self.num_untouched)
                self.num_untouched -= 1
            else:
                blocks.append(self.cached.pop(0))
                (name,) = [name for name, block in self.block_of.items() if block == blocks[-1]]
                del self.block_of[name]
        return blocks

    def _expect_freed(self, block: int) -> None:
        if self._num_owners(block) == 0:
            (self.cached if block in self.block_of.values() else self.empty).append(block)

    @rule(text=TEXTS, num_more=st.integers(0, 3))
    def start(self, text: str, num_more: int) -> None:
        """A new owner gets the blocks found for its text and free blocks for the rest, or none if too few are free."""
        owner = Owner(text, [], 0)
        names = [owner.name(index) for index in range(len(text))]
        found: list[int] = []
        while len(found) < len(names) and names[len(found)] in self.block_of:
            found.append(self.block_of[names[len(found)]])
        num_owned = sum(self._num_owners(block) > 0 for block in found)
        assert self.allocator.find(names) == CachedPrefix(len(found), num_owned)
        assert all(self._num_owners(block) > 0 for block in found[:num_owned])
        num_blocks = len(text) + num_more
        blocks = self.allocator.allocate(num_blocks, names[: len(found)])
        if num_blocks - num_owned > self._num_free:
            assert blocks is None
            return
        self.cached = [block for block in self.cached if block not in found]
        assert blocks == found + self._expect_taken(num_blocks - len(found))
        self.owners.append(Owner(text, blocks, len(found)))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """The next block of a chain is computed: others can find it, or its owner gets the block that was found."""
        owner = data.draw(st.sampled_from(self.owners))
        index = owner.num_shared
        if index == min(len(owner.text), len(owner.blocks)):
            return
        own = owner.blocks[index]
        expected = self.block_of.setdefault(owner.name(index), own)
        owner.blocks[index] = self.allocator.share(own, owner.name(index))
        owner.num_shared += 1
        assert owner.blocks[index] == expected
        if expected != own:
            self.allocator.free([own])
            self._expect_freed(own)
        self.cached = [block for block in self.cached if block != expected]

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        blocks = self.allocator.allocate(1)
        if self._num_free == 0:
            assert blocks is None
            return
        assert blocks == self._expect_taken(1)
        owner.blocks += blocks

    @rule(num_blocks=st.integers(1, NUM_BLOCKS + 1))
    def limit_memory(self, num_blocks: int) -> None:
        """Memory gets short or comes back, which affects only blocks that were never handed out."""
        self.allocator.limit(num_blocks)
        self.limit = min(num_blocks, NUM_BLOCKS)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A chain loses an owner, its tail first."""
        owner = data.draw(st.sampled_from(self.owners))
        self.allocator.free(owner.blocks)
        while owner.blocks:
            self._expect_freed(owner.blocks.pop())
        self.owners.remove(owner)

    @precondition(lambda self: self.empty or self.cached)
    @rule(data=st.data())
    def free_again(self, data: st.DataObject) -> None:
        """A block without an owner can be neither freed nor shared."""
        block = data.draw(st.sampled_from(self.empty + self.cached))
        with pytest.raises(ValueError, match="free already"):
            self.allocator.free([block])
        with pytest.raises(ValueError, match="is free"):
            self.allocator.share(block, b"aaaaaaaaa")

    @invariant()
    def conserved(self) -> None:
        """Each block is owned, cached or empty, and a block with several owners is computed."""
        owned = {block for owner in self.owners for block in owner.blocks}
        touched = range(NUM_BLOCKS - self.num_untouched)
        assert sorted([*owned, *self.empty, *self.cached]) == list(touched)
        assert self.allocator.num_free_blocks == self._num_free
        assert self.allocator.num_usable_blocks == len(touched) + self._num_left
        for owner in self.owners:
            assert all(self._num_owners(block) == 1 for block in owner.blocks[owner.num_shared :])


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(0, 6), max_size=60))
def test_conserved(sizes: list[int]) -> None:
    """Whatever is allocated and freed, free and owned blocks sum to the pool, and no block has two owners."""
    allocator = BlockAllocator(10)
    owned: list[list[int]] = []
    for size in sizes:
        blocks = allocator.allocate(size)
        if blocks is None:
            assert size > allocator.num_free_blocks
            if owned:
                allocator.free(owned.pop(0))
        else:
            owned.append(blocks)
        flat = [block for blocks in owned for block in blocks]
        assert len(set(flat)) == len(flat)
        assert len(flat) + allocator.num_free_blocks == 10


def test_the_longest_unused_chain_is_evicted_first_and_from_its_tail() -> None:
    """A cached block is handed out only if no other is left: the last block of the chain freed first."""
    allocator = BlockAllocator(5)
    chains = {}
    for names in ((b"a", b"ab"), (b"c", b"cd")):
        blocks = allocator.allocate(2)
        assert blocks is not None
        chains[names] = [allocator.share(block, name) for block, name in zip(blocks, names, strict=True)]
    for chain in chains.values():
        allocator.free(chain)
    assert allocator.num_free_blocks == 5
    assert [allocator.find(names) for names in chains] == [(2, 0), (2, 0)]
    assert [allocator.allocate(1) for _ in range(3)] == [[4], [1], [0]]
    assert [allocator.find(names).num_blocks for names in chains] == [0, 2]


def test_double_free_raises() -> None:
    """Freeing a block twice is a bug, and raises."""
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(1)
    assert blocks is not None
    allocator.free(blocks)
    with pytest.raises(ValueError, match="free already"):
        allocator.free(blocks)


def test_a_shared_block_keeps_its_name() -> None:
    """A shared block's content never changes, so another name for it is a bug."""
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(1)
    assert blocks is not None
    allocator.share(blocks[0], b"a")
    assert allocator.share(blocks[0], b"a") == blocks[0]
    with pytest.raises(ValueError, match="something else"):
        allocator.share(blocks[0], b"b")


def test_rows_are_rounded_up() -> None:
    """A partly filled block counts as a whole block."""
    assert [rows_for(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_blocks_never_handed_out_cannot_be_given_up() -> None:
    """Freeing or sharing a block that nobody ever had is a bug, and raises."""
    allocator = BlockAllocator(2)
    with pytest.raises(ValueError, match="free already"):
        allocator.free([1])
    with pytest.raises(ValueError, match="is free"):
        allocator.share(1, b"name")


def test_a_chain_is_not_shorter_than_its_cached_blocks() -> None:
    """It is a bug of the caller to ask for fewer blocks than it names, and nothing is owned then."""
    allocator = BlockAllocator(4)
    (block,) = allocator.allocate(1) or []
    allocator.share(block, b"a")
    with pytest.raises(ValueError, match="0 blocks begin with 1"):
        allocator.allocate(0, [b"a"])
    assert allocator.num_freed_by([block]) == 1

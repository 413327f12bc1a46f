"""Blocks: each is free or owned, none is ever both or neither."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorserve.core.blocks import BlockAllocator, blocks_for


@given(st.lists(st.integers(0, 6), max_size=60))
def test_conserved(sizes: list[int]) -> None:
    """Whatever is taken and given back, free and owned add up and no block has two owners."""
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


def test_double_free_raises() -> None:
    """A block given back twice is a bug, and says so."""
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(1)
    assert blocks is not None
    allocator.free(blocks)
    with pytest.raises(ValueError, match="free already"):
        allocator.free(blocks)


def test_blocks_for_rounds_up() -> None:
    """A partly filled block is a whole block."""
    assert [blocks_for(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]

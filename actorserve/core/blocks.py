"""The block allocator: who may write where in an instance's KV pool. Holds numbers only; the bytes are the engine's."""

from collections.abc import Iterable


class BlockAllocator:
    """A pool of ``num_blocks`` equal blocks, each free or owned by one request.

    The most recently freed block is handed out first: its memory is the likeliest to be in a cache. The order is a
    function of the calls alone, so a replay hands out the same blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = [True] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take ``num_blocks`` blocks, or None (and none taken) where fewer are free."""
        if num_blocks > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._is_free[block] = False
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Raises ValueError for a block that is free already: that is a bug of the caller."""
        for block in blocks:
            if self._is_free[block]:
                raise ValueError(f"block {block} is free already")
            self._is_free[block] = True
            self._free.append(block)


def blocks_for(num_tokens: int, tokens_per_block: int) -> int:
    """Blocks that hold ``num_tokens`` tokens' KV."""
    return -(-num_tokens // tokens_per_block)

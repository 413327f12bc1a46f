"""The block allocator: who may write where in an instance's KV pool, and what lies there. Holds numbers, not bytes."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class CachedPrefix(NamedTuple):
    """How much of a chain of blocks lies in the pool, and how much of that is owned by somebody now."""

    num_blocks: int
    num_owned: int


class BlockAllocator:
    """A pool of ``num_blocks`` equal blocks, each owned by one request or several, or by none and thus free.

    A full block whose KV is computed can be *shared* under its content's name (``core.kv.prefix_cache``): others may
    then own it too, nobody writes it any more, and once nobody owns it, it stays *cached* until its place is needed. A
    free block is handed out in this order: one without content, the most recently freed first (its memory is the
    likeliest to be in the CPU's caches); then one that never was handed out, for its memory may not be resident yet;
    then the cached one that has been without an owner for longest. Where memory is short, ``limit`` keeps back those
    that never were handed out.

    Blocks come and go as chains, each block after those that its content goes on from. Whoever owns a block owns all
    before it in its chain, and gives them up after it. So of a chain the tail is evicted first, and what is cached of
    it is always a beginning, of which what is owned is a beginning again; ``find`` relies on that. All orders are
    functions of the calls alone, so a replay hands out the same blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._empty: list[int] = []
        self._num_touched = 0  # blocks that were ever handed out: the first ones
        self._limit = num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # shared and without an owner, longest first
        self._num_owners = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks  # of what a shared block holds
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner that can be handed out, those that are cached included."""
        return len(self._empty) + len(self._cached) + self._num_untouched

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that are owned or can be handed out: all, but for those that are kept back."""
        return self._num_touched + self._num_untouched

    def limit(self, num_blocks: int) -> None:
        """Let no more than so many blocks ever have been handed out. Those that were already stay usable."""
        self._limit = min(num_blocks, self.num_blocks)

    @property
    def _num_untouched(self) -> int:
        return max(0, self._limit - self._num_touched)

    def find(self, names: Sequence[bytes]) -> CachedPrefix:
        """How many blocks at the beginning of this chain lie in the pool. Takes none of them."""
        num_blocks = bisect_left(names, True, key=lambda name: name not in self._block_of)
        num_owned = bisect_left(
            names, True, hi=num_blocks, key=lambda name: self._num_owners[self._block_of[name]] == 0
        )
        return CachedPrefix(num_blocks, num_owned)

    def allocate(self, num_blocks: int, cached: Sequence[bytes] = ()) -> list[int] | None:
        """Own ``num_blocks`` blocks, the first of them those that lie in the pool under the names ``cached``.

        None (and none owned) where fewer are free. Raises: KeyError for a name that ``find`` does not find.
        """
        blocks = [self._block_of[name] for name in cached]
        num_new = num_blocks - len(blocks)
        if num_new + sum(not self._num_owners[block] for block in blocks) > self.num_free_blocks:
            return None
        for block in blocks:
            self._own(block)
        blocks += [self._take() for _ in range(num_new)]
        return blocks

    def share(self, block: int, name: bytes) -> int:
        """``block`` is owned, full and computed: let others own it too. The block that its owner has from now on.

        That is another one where the same content lies in the pool already; the owner's own is then free.
        Raises: ValueError for a block that is free, or shared under another name: that is a bug of the caller.
        """
        if not self._num_owners[block] or self._names[block] not in (None, name):
            raise ValueError(f"block {block} is free, or holds something else")
        shared = self._block_of.setdefault(name, block)
        if shared == block:
            self._names[block] = name
        else:
            self._own(shared)
            self.free([block])
        return shared

    def num_freed_by(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are free once one owner has given them up."""
        return sum(self._num_owners[block] == 1 for block in blocks)

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one ownership of each block of a chain.

        Raises: ValueError for a block that is free already: that is a bug of the caller.
        """
        for block in reversed(blocks):
            if not self._num_owners[block]:
                raise ValueError(f"block {block} is free already")
            self._num_owners[block] -= 1
            if self._num_owners[block]:
                continue
            if self._names[block] is None:
                self._empty.append(block)
            else:
                self._cached[block] = None

    def _own(self, block: int) -> None:
        self._cached.pop(block, None)
        self._num_owners[block] += 1

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        elif self._num_untouched:
            block = self._num_touched
            self._num_touched += 1
        else:
            block, _ = self._cached.popitem(last=False)
            name, self._names[block] = self._names[block], None
            assert name is not None
            del self._block_of[name]
        self._num_owners[block] = 1
        return block


def blocks_for(num_tokens: int, tokens_per_block: int) -> int:
    """Blocks that hold ``num_tokens`` tokens' KV."""
    return -(-num_tokens // tokens_per_block)

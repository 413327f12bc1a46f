"""The block allocator: which blocks of a KV pool are owned, free or cached. It holds block numbers, not bytes."""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class CachedPrefix(NamedTuple):
    """How many blocks at the beginning of a chain lie in the pool, and how many of these have owners now."""

    num_blocks: int
    num_owned: int


class BlockAllocator:
    """A pool of ``num_blocks`` equal blocks, each owned by one or more holdings, or by none and thus free.

    A full block whose KV is computed can be *shared* under its content's name (``core.kv.prefix_cache``). Then others
    may own it too, and nothing writes it any more. Once it has no owner it stays *cached* until its place is needed.
    Free blocks are handed out in this order:

    - a block without content, the most recently freed first, because its memory is the likeliest to be in CPU caches;
    - a block that was never handed out, because its memory may not be resident yet;
    - the cached block that has had no owner for longest.

    If memory is short, ``limit`` keeps back blocks that were never handed out.

    Blocks are owned as chains, in which the content of each block continues the one before. The owner of a block owns
    all blocks before it in the chain, and gives them up after it. So the tail of a chain is evicted first. The cached
    part of a chain is always a beginning of it, and the owned part is a beginning of that; ``find`` relies on this.
    (Chains of layers with a window are given up from the front, too. ``find`` is not asked for them.) All orders depend
    on the calls alone, so a replay hands out the same blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._empty: list[int] = []
        self._num_touched = 0  # the first blocks of the pool, which were handed out before
        self._limit = num_blocks
        # Shared blocks without an owner; the block that has had none for longest is first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        # Of the blocks that were handed out before, because a simulator has many large pools that are mostly empty.
        self._num_owners: list[int] = []
        self._names: list[bytes | None] = []  # of each shared block's content
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner that can be handed out, including cached blocks."""
        return len(self._empty) + len(self._cached) + self._num_untouched

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that are owned or can be handed out: all except those kept back by ``limit``."""
        return self._num_touched + self._num_untouched

    def limit(self, num_blocks: int) -> None:
        """Use no more than ``num_blocks`` different blocks. Blocks that were handed out before stay usable."""
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

    def has(self, name: bytes) -> bool:
        """Whether a block with this content lies in the pool."""
        return name in self._block_of

    def num_owned(self, names: Iterable[bytes]) -> int:
        """How many of these blocks have owners. Raises: KeyError for a name of which ``has`` is False."""
        return sum(self._num_owners[self._block_of[name]] > 0 for name in names)

    def allocate(self, num_blocks: int, cached: Sequence[bytes] = ()) -> list[int] | None:
        """Own ``num_blocks`` blocks, beginning with the blocks that lie in the pool under the names ``cached``.

        None, and none owned, if fewer are free. Raises: KeyError for a name that ``find`` does not find; ValueError for
        more names than blocks: a bug of the caller.
        """
        if len(cached) > num_blocks:
            raise ValueError(f"{num_blocks} blocks begin with {len(cached)} cached ones")
        blocks = [self._block_of[name] for name in cached]
        num_new = num_blocks - len(blocks)
        if num_new + sum(not self._num_owners[block] for block in blocks) > self.num_free_blocks:
            return None
        for block in blocks:
            self._own(block)
        blocks += [self._take() for _ in range(num_new)]
        return blocks

    def share(self, block: int, name: bytes) -> int:
        """Let others own ``block``, which is owned, full and computed. Returns the block that its owner now has.

        If the same content already lies in another block, that block is returned, and owned too: ``free`` this one.
        Raises: ValueError for a block that is free, or shared under another name: a bug of the caller.
        """
        if not self._is_owned(block) or self._names[block] not in (None, name):
            raise ValueError(f"block {block} is free, or holds something else")
        shared = self._block_of.setdefault(name, block)
        if shared == block:
            self._names[block] = name
        else:
            self._own(shared)
        return shared

    def num_freed_by(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are free once one owner has given them all up."""
        return sum(self._num_owners[block] == 1 for block in blocks)

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one ownership of each block of a chain.

        Raises: ValueError for a block that is free already: a bug of the caller.
        """
        for block in reversed(blocks):
            if not self._is_owned(block):
                raise ValueError(f"block {block} is free already")
            self._num_owners[block] -= 1
            if self._num_owners[block]:
                continue
            if self._names[block] is None:
                self._empty.append(block)
            else:
                self._cached[block] = None

    def validate(self, owned: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless these are the blocks of all owners, and every other block is free or cached."""
        num_owners = Counter(block for blocks in owned for block in blocks)
        named = {block: name for block, name in enumerate(self._names) if name is not None}
        assert {name: block for block, name in named.items()} == self._block_of, "names and blocks do not match"
        empty = set(self._empty)
        assert len(empty) == len(self._empty), "a block is free twice"
        assert len(self._num_owners) == len(self._names) == self._num_touched, "only blocks handed out have entries"
        assert all(block < self._num_touched for block in (*num_owners, *empty)), "a block was never handed out"
        for block in range(self._num_touched):
            num_owned, num_counted = num_owners[block], self._num_owners[block]
            assert num_owned == num_counted, f"block {block} has {num_owned} owners, but {num_counted} are counted"
            is_free = not num_owned
            assert (block in empty) == (is_free and block not in named), f"block {block} is lost, or free and in use"
            assert (block in self._cached) == (is_free and block in named), f"block {block} is cached wrongly"

    def _is_owned(self, block: int) -> bool:
        return block < self._num_touched and self._num_owners[block] > 0

    def _own(self, block: int) -> None:
        self._cached.pop(block, None)
        self._num_owners[block] += 1

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        elif self._num_untouched:
            block = self._num_touched
            self._num_touched += 1
            self._num_owners.append(0)
            self._names.append(None)
        else:
            block, _ = self._cached.popitem(last=False)
            name, self._names[block] = self._names[block], None
            assert name is not None
            del self._block_of[name]
        self._num_owners[block] = 1
        return block


def rows_for(num_tokens: int, tokens_per_block: int) -> int:
    """Rows that hold the KV of ``num_tokens`` tokens. A row is one block, or one of each layer group."""
    return -(-num_tokens // tokens_per_block)

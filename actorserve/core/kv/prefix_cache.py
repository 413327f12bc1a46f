"""The prefix cache: a request skips the tokens whose KV already lies in the pool, whichever request computed it.

The KV of a token depends on that token and all tokens before it. So a full row is named by a hash of its tokens and of
the previous row's name: equal names, equal KV. A row is one block, or one of each layer group
(``core.kv.layer_groups``), and then a block's name is its row's name and its group's number. The first row's hash
starts from the tenant's ``cache_salt``: tenants with different salts share nothing, and cannot learn from an answer's
speed what other tenants asked. Names have 256 bits because clients choose tokens, and must not be able to find two
prompts with the same name.

If the model's layers have windows, a request can go on after n found rows if the windowed groups' blocks are there for
the last window before that place. Older ones are not needed. They have been without an owner for longer, so they are
evicted first.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from actorserve.core.kv.block_allocator import BlockAllocator, rows_for
from actorserve.core.kv.kv_holding import KVHolding
from actorserve.core.kv.layer_groups import NO_BLOCK, Rows

_NAME_BYTES = 32
_TOKEN_BYTES = 8


class Found(NamedTuple):
    """The first ``num_rows`` rows of a holding lie in the pool; the windowed groups have blocks from ``first_row`` on.
    Of these blocks ``num_owned`` have owners now.
    """

    num_rows: int
    first_row: int
    num_owned: int


class PrefixCache:
    """Connects requests with the allocator's shared blocks. Without ``enabled`` it finds nothing and shares nothing."""

    def __init__(self, allocator: BlockAllocator, rows: Rows, tokens_per_block: int, enabled: bool) -> None:
        self._allocator = allocator
        self._rows = rows
        self._tokens_per_block = tokens_per_block
        self._enabled = enabled
        self.num_tokens_looked_up = 0
        self.num_tokens_found = 0

    def num_blocks_wanted(self, holding: KVHolding) -> int:
        """Free blocks that a request without device blocks takes when it gets them, including cached blocks with its
        tokens.
        """
        num_rows = rows_for(holding.num_tokens, self._tokens_per_block)
        found = self.find(holding)
        end_row = self._rows.end_row(num_rows, found.first_row)
        return self._rows.count(0, num_rows, found.first_row, end_row) - found.num_owned

    def find(self, holding: KVHolding) -> Found:
        """The first rows that lie in the pool. Takes none of their blocks.

        The windowed groups of a waiting request have no first row yet, so the cache chooses one. For a swapped request
        or a migration it is given, because the other rows' blocks come from elsewhere.
        """
        names = self._names(holding)
        if not self._rows.num_windowed:
            num_rows, num_owned = self._allocator.find(names)
            return Found(num_rows, 0, num_owned)
        if holding.host_blocks or holding.num_computed:
            first_row = holding.first_row
            end_row = self._rows.end_row(len(names), first_row)  # another request may have computed more rows
            num_rows = self._num_in_pool(names[:end_row], first_row)
        else:
            num_rows = self._num_resumable(names)
            first_row = self._rows.first_seen(num_rows)
        return Found(num_rows, first_row, self._num_owned(names[:num_rows], first_row))

    def found_names(self, holding: KVHolding, found: Found) -> list[bytes]:
        """The names of the blocks that ``find`` has found for this holding, row by row."""
        names = self._names(holding)[: found.num_rows]
        if not self._rows.num_windowed:
            return names
        return [name for row, name in enumerate(names) for name in self._of_row(name, row >= found.first_row)]

    def num_cached_tokens(self, holding: KVHolding) -> int:
        """How many tokens need not be computed if the request starts now."""
        return self.find(holding).num_rows * self._tokens_per_block

    def on_started(self, holding: KVHolding, num_found: int) -> None:
        """A waiting request got its blocks, of which the first ``num_found`` rows count as computed."""
        holding.num_computed = num_found * self._tokens_per_block
        if self._enabled and holding.num_cached_tokens is None:
            holding.num_cached_tokens = holding.num_computed
            self.num_tokens_looked_up += len(holding.token_ids)
            self.num_tokens_found += holding.num_computed

    def share_computed(self, holding: KVHolding, num_fed: int) -> list[int]:
        """Let others find the rows that the ``num_fed`` newest computed tokens have filled.

        Returns the blocks whose content lay in the pool already. The holding has the older blocks now, and these are
        to be freed.
        """
        num_full, num_over = divmod(holding.num_computed, self._tokens_per_block)
        if num_over >= num_fed or not self._enabled:
            return []  # no row was filled, as in most decode steps
        names = block_names(holding, num_full, self._tokens_per_block)
        num_groups, replaced = self._rows.num_groups, []
        for row in range((holding.num_computed - num_fed) // self._tokens_per_block, num_full):
            for index, name in enumerate(self._of_row(names[row], True), row * num_groups):
                block = holding.blocks[index]
                if block == NO_BLOCK:
                    continue
                holding.blocks[index] = shared = self._allocator.share(block, name)
                if shared != block:
                    replaced.append(block)
        return replaced

    def _names(self, holding: KVHolding) -> list[bytes]:
        """Names of the rows that may be found. Not the last token's, because it must be fed to get the next token."""
        if not self._enabled or not holding.may_reuse_kv:
            return []
        return block_names(holding, (len(holding.token_ids) - 1) // self._tokens_per_block, self._tokens_per_block)

    def _of_row(self, name: bytes, has_windowed: bool) -> Sequence[bytes]:
        """The names of a row's blocks."""
        return self._names_of(name, range(self._rows.num_groups if has_windowed else self._rows.num_full))

    def _full(self, name: bytes) -> Sequence[bytes]:
        """The names of a row's blocks in full groups."""
        return self._names_of(name, range(self._rows.num_full))

    def _windowed(self, name: bytes) -> Sequence[bytes]:
        """The names of a row's blocks in windowed groups."""
        return self._names_of(name, range(self._rows.num_full, self._rows.num_groups))

    def _names_of(self, name: bytes, groups: range) -> Sequence[bytes]:
        return [name + bytes([group]) for group in groups] if self._rows.num_groups > 1 else [name] * len(groups)

    def _is_in_pool(self, names: Sequence[bytes]) -> bool:
        return all(map(self._allocator.has, names))

    def _num_full_rows(self, names: Sequence[bytes]) -> int:
        """How many first rows lie in the pool in full groups; all of them if there is no such group."""
        # The full groups' cached rows are a beginning of the chain (``BlockAllocator``).
        return bisect_left(names, True, key=lambda name: not self._is_in_pool(self._full(name)))

    def _num_in_pool(self, names: Sequence[bytes], first_row: int) -> int:
        """How many first rows lie in the pool, if the windowed groups need theirs from ``first_row`` on."""
        end = self._num_full_rows(names)
        return next((row for row in range(first_row, end) if not self._is_in_pool(self._windowed(names[row]))), end)

    def _num_resumable(self, names: Sequence[bytes]) -> int:
        """After how many rows, at most, a request can go on with what lies in the pool."""
        end = self._num_full_rows(names)
        row = end - 1
        while row >= self._rows.first_seen(end):
            if not self._is_in_pool(self._windowed(names[row])):
                end = row
            row -= 1
        return end

    def _num_owned(self, names: Sequence[bytes], first_row: int) -> int:
        """How many blocks of these rows, which lie in the pool, have owners."""
        num_owned, num_full = self._allocator.num_owned, self._rows.num_full
        # The owned part of a chain is a beginning of it, too, and an owner has all full groups' blocks of a row.
        num_rows = bisect_left(names, True, key=lambda name: num_owned(self._full(name)) < num_full)
        return num_full * num_rows + sum(num_owned(self._windowed(name)) for name in names[first_row:])


def block_names(holding: KVHolding, num_rows: int, tokens_per_block: int) -> list[bytes]:
    """The names of its first ``num_rows`` rows, all of them full.

    The names are kept in the holding, so that each row is hashed once.
    """
    names = holding.block_names
    first = len(names)
    tokens = array("q", holding.token_ids[first * tokens_per_block : num_rows * tokens_per_block]).tobytes()
    row_bytes = tokens_per_block * _TOKEN_BYTES
    name = names[-1] if names else _root(holding.cache_salt)
    for start in range(0, len(tokens), row_bytes):
        name = blake2b(name + tokens[start : start + row_bytes], digest_size=_NAME_BYTES).digest()
        names.append(name)
    return names[:num_rows]


def _root(cache_salt: str) -> bytes:
    # Hashed in a domain of its own, so that no tenant can choose a salt that equals the name of another's block.
    return blake2b(cache_salt.encode(), digest_size=_NAME_BYTES, person=b"cache_salt").digest()

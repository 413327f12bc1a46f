"""Layer groups: layers with a sliding window give up the KV of tokens that no token sees any more.

A model's layers are split into groups of equal size: groups whose layers attend to all tokens, and groups whose layers
see only the newest ones. A block holds ``tokens_per_block`` tokens of one group's layers, so all groups share one pool,
and memory is not divided between them in advance. Most models have no windows, and one group with all layers.

The list of a request's blocks goes row by row. A *row* has the blocks of the same tokens, one for each group, the full
groups first. The windowed groups have blocks from the holding's ``first_row`` up to its ``end_row``; elsewhere their
places say ``NO_BLOCK``. Rows before ``first_row`` were given up, because no token to come sees them. Rows from
``end_row`` on get blocks only when earlier rows are given up. So a windowed group never needs blocks for a
whole long prompt at once.

The idea is vLLM's (its hybrid KV cache manager). There a request has a table for each group, and so has a block's name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from actorserve.core.kv.block_allocator import rows_for
from actorserve.core.messages import RowShape

NO_BLOCK = -1
"""Stands in a list of blocks where a windowed group has none."""

_SPARE_ROWS = 4  # one that is filled in part, one kept behind the window, and one at either end of the window


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """``num_full`` groups of layers attend to everything; in ``num_windowed`` a token sees ``window`` tokens, itself
    included. Layers without a window are one group unless others have windows. Raises: ValueError for other numbers.
    """

    num_full: int = 1
    num_windowed: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        if not self.num_windowed and (self.num_full, self.window) != (1, 0):
            raise ValueError(f"without windows there is one group and no window, not {self}")
        if self.num_windowed < 0 or self.num_full < 0 or (self.num_windowed and self.window < 1):
            raise ValueError(f"groups of layers need counts of at least 0 and a window of at least 1, not {self}")

    @property
    def num_groups(self) -> int:
        return self.num_full + self.num_windowed

    def row_shape(self, tokens_per_block: int, max_chunk_tokens: int) -> RowShape:
        """The blocks of a request that is fed at most ``max_chunk_tokens`` tokens at a time.

        While an iteration runs, the next one is planned: the windowed groups hold the window before the first one's
        tokens, and the tokens of both.
        """
        if not self.num_windowed:
            return RowShape(self.num_full)
        num_tokens = self.window + 2 * max_chunk_tokens
        return RowShape(self.num_full, self.num_windowed, rows_for(num_tokens, tokens_per_block) + _SPARE_ROWS)


ONE_GROUP: Final = LayerGroups()
"""All layers of a model without windows."""


class Rows:
    """Arithmetic of rows, for one model. Counts of rows are of ``tokens_per_block`` tokens."""

    def __init__(self, groups: LayerGroups, tokens_per_block: int, max_chunk_tokens: int) -> None:
        """``max_chunk_tokens``: the longest chunk of a prefill."""
        self.num_full = groups.num_full
        self.num_windowed = groups.num_windowed
        self.num_groups = groups.num_groups
        self.max_chunk_tokens = max_chunk_tokens
        self.shape = groups.row_shape(tokens_per_block, max_chunk_tokens)
        self._window = groups.window
        self._tokens_per_block = tokens_per_block

    def first_seen(self, num_rows: int) -> int:
        """The first row that the tokens after ``num_rows`` full rows see in windowed groups; 0 without windows."""
        if not self.num_windowed:
            return 0
        return max(0, num_rows * self._tokens_per_block - self._window + 1) // self._tokens_per_block

    def first_kept(self, num_computed: int) -> int:
        """The first row that a request with so many computed tokens keeps in windowed groups.

        One row more than it needs, so that for a while its last full row can still be checkpointed, and it can go on
        from there.
        """
        return self.first_seen(num_computed // self._tokens_per_block - 1)

    def end_row(self, num_rows: int, first_row: int) -> int:
        """Up to which of ``num_rows`` rows the windowed groups get blocks now, if they have them from ``first_row``."""
        return min(num_rows, first_row + self.shape.max_window_rows) if self.num_windowed else 0

    def count(self, begin: int, end: int, first_row: int, end_row: int) -> int:
        """How many blocks the rows from ``begin`` to ``end`` have, if windowed groups have ``first_row`` to
        ``end_row``.
        """
        if not self.num_windowed:
            return end - begin
        return self.num_full * (end - begin) + self.num_windowed * max(0, min(end, end_row) - max(begin, first_row))

    def place(self, blocks: list[int], begin: int, end: int, first_row: int, end_row: int) -> list[int]:
        """``blocks``, of which there are ``count`` of the same arguments, with ``NO_BLOCK`` in the empty places."""
        if not self.num_windowed:
            return blocks
        placed: list[int] = []
        source, empty = iter(blocks), [NO_BLOCK] * self.num_windowed
        for row in range(begin, end):
            if first_row <= row < end_row:
                placed += islice(source, self.num_groups)
            else:
                placed += islice(source, self.num_full)
                placed += empty
        return placed

    def held(self, blocks: Sequence[int]) -> list[int]:
        """The blocks in a list of rows, without empty places."""
        return [block for block in blocks if block != NO_BLOCK] if self.num_windowed else list(blocks)

    def span(self, blocks: Sequence[int], begin: int, end: int, first_row: int) -> list[int]:
        """The blocks of the rows from ``begin`` to ``end``, those of windowed groups only from ``first_row`` on."""
        if not self.num_windowed:
            return list(blocks[begin:end])
        full_end = min(max(begin, first_row), end)
        size, num_full = self.num_groups, self.num_full
        full = [block for row in range(begin, full_end) for block in blocks[row * size : row * size + num_full]]
        return full + self.held(blocks[full_end * size : end * size])

    def give_up(self, blocks: list[int], begin: int, end: int) -> list[int]:
        """Empty the windowed groups' places in the rows from ``begin`` to ``end``. Returns the blocks in them."""
        given_up: list[int] = []
        empty = [NO_BLOCK] * self.num_windowed
        for row in range(begin, end):
            at = slice(row * self.num_groups + self.num_full, (row + 1) * self.num_groups)
            given_up += self.held(blocks[at])
            blocks[at] = empty
        return given_up

    def fill(self, blocks: list[int], begin: int, end: int, new: list[int]) -> None:
        """Put ``new`` blocks into the windowed groups' empty places in the rows from ``begin`` to ``end``."""
        for number, row in enumerate(range(begin, end)):
            at = row * self.num_groups + self.num_full
            blocks[at : at + self.num_windowed] = new[number * self.num_windowed : (number + 1) * self.num_windowed]

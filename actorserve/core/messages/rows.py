"""How many blocks of KV a request needs, as a load report says it."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class RowShape:
    """The blocks of one request, as far as its length decides them.

    The layers of a model are split into groups of equal size, and a block holds ``tokens_per_block`` tokens of one
    group's layers. The blocks of the same tokens, one for each group, are a *row*. ``num_full`` groups keep all rows.
    ``num_windowed`` groups, whose layers have a sliding window, keep at most ``max_window_rows`` of them at a time.
    """

    num_full: int = 1
    num_windowed: int = 0
    max_window_rows: int = 0

    def num_blocks(self, num_rows: int) -> int:
        """The most blocks that a request of so many rows holds at a time."""
        if not self.num_windowed:
            return self.num_full * num_rows
        return self.num_full * num_rows + self.num_windowed * min(num_rows, self.max_window_rows)

    def max_rows(self, num_blocks: int) -> int:
        """The rows of the longest request that so many blocks hold. If no group keeps all rows, one might go on for
        ever; then it is the number of blocks.
        """
        num_rows = num_blocks // max(1, self.num_full + self.num_windowed)
        if not self.num_windowed or num_rows < self.max_window_rows:
            return num_rows
        if not self.num_full:
            return num_blocks
        return (num_blocks - self.num_windowed * self.max_window_rows) // self.num_full

    @property
    def blocks_per_row(self) -> int:
        """The blocks that a row adds to a long request; 1 if it adds none."""
        return max(1, self.num_full)


ONE_BLOCK_A_ROW: Final = RowShape()
"""The shape for models without windows."""

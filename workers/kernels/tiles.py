"""Row tiles: token-wise work in a few fixed numbers of rows that give a row the same bits, whatever the batch.

A float GEMM may sum in another order for another number of rows, and vector loops may round differently in their tails.
So every token-wise function runs over tiles of fixed sizes. `probe` runs the real functions on this machine to find the
sizes that agree bit for bit in every row. Rounding to bfloat16 would hide most differences, so linear layers are also
probed with sums that cancel (``workers.models.probing``).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

RowFunction = Callable[..., tuple[Tensor, ...]]
"""Takes and returns tensors of R rows (dimension 0). Each row of the results depends on the same row alone."""

_NUM_PROBE_ROWS = 16  # at least


class RowTiles:
    """Covers any number of rows with tiles of the given sizes."""

    def __init__(self, sizes: Sequence[int], overhead_rows: int) -> None:
        """``sizes``: rows a tile may have. ``overhead_rows``: the cost of a tile's start (reading weights), in rows.

        Raises: ValueError if there is no size, a size is below 1, or the overhead is negative.
        """
        if not sizes or min(sizes) < 1 or overhead_rows < 0:
            raise ValueError(f"no tiles of {tuple(sizes)} rows with an overhead of {overhead_rows}")
        self.sizes = tuple(sorted(set(sizes)))
        self.overhead_rows = overhead_rows
        largest = self.sizes[-1]
        costs, firsts = [0], [0]  # by number of rows: the cheapest cover's cost, and its largest tile
        for rows in range(1, largest + 1):
            cost, first = min((size + overhead_rows + costs[max(0, rows - size)], -size) for size in self.sizes)
            costs.append(cost)
            firsts.append(-first)
        self._firsts = firsts

    def cover(self, num_rows: int) -> tuple[int, ...]:
        """Tile sizes, largest first, that sum to at least ``num_rows``; only the last tile may be partly filled."""
        largest = self.sizes[-1]
        num_largest, rest = divmod(num_rows, largest)
        tiles = []
        while rest > 0:
            tiles.append(self._firsts[rest])
            rest -= self._firsts[rest]
        return (largest,) * num_largest + tuple(sorted(tiles, reverse=True))

    def run(self, function: RowFunction, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run ``function`` over all rows, tile by tile. Zeros fill the last tile, and their results are cut off."""
        num_rows = inputs[0].shape[0]
        tiles = self.cover(num_rows)
        if len(tiles) == 1:
            return _run_tile(function, inputs, 0, tiles[0], num_rows)
        outputs, start = [], 0
        for size in tiles:
            outputs.append(_run_tile(function, inputs, start, size, num_rows))
            start += size
        return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))


class AnyRows:
    """Runs all rows in one call: for functions that give a row the same bits for any number of rows."""

    sizes: tuple[int, ...] = ()

    def run(self, function: RowFunction, *inputs: Tensor) -> tuple[Tensor, ...]:
        return function(*inputs)


def _run_tile(
    function: RowFunction, inputs: tuple[Tensor, ...], start: int, size: int, num_rows: int
) -> tuple[Tensor, ...]:
    missing = start + size - num_rows
    if missing <= 0:
        return function(*(rows[start : start + size] for rows in inputs))
    padded = (F.pad(rows[start:], (0, 0) * (rows.dim() - 1) + (0, missing)) for rows in inputs)
    return tuple(rows[: size - missing] for rows in function(*padded))


def probe(
    function: RowFunction,
    make_inputs: Callable[[int], tuple[Tensor, ...]],
    candidates: Sequence[int],
    base: int,
) -> tuple[int, ...]:
    """The sizes among ``candidates`` whose tiles give every row the same bits as tiles of the base size.

    ``make_inputs(n)`` gives n rows of random inputs. The base is ``base``, or the next smaller candidate whose bits do
    not depend on a row's place in the tile; a tile of one row always qualifies. Each size is tried with the rows in
    order and shuffled, as neighbouring slices of one buffer, because tiles are cut in the same way.

    The probe compares few rows, so any difference must show in many numbers of the results. Sums that are rounded to
    bfloat16 do not show it (``workers.kernels.linear.cancelling_linear``).
    """
    num_rows = max(_NUM_PROBE_ROWS, *candidates)
    inputs = make_inputs(num_rows)
    orders = [
        torch.arange(num_rows),
        torch.randperm(num_rows, generator=torch.Generator().manual_seed(0)),
    ]

    def agrees(size: int, reference: tuple[Tensor, ...]) -> bool:
        count = max(size, _NUM_PROBE_ROWS // size * size)
        return all(
            _equal(_in_tiles(function, inputs, order[:count], size), reference, order[:count]) for order in orders
        )

    for first in sorted((size for size in candidates if size <= base), reverse=True):
        reference = _in_tiles(function, inputs, orders[0][: num_rows // first * first], first)
        if num_rows % first == 0 and agrees(first, reference):
            return tuple(size for size in sorted(candidates) if size == first or agrees(size, reference))
    raise ValueError(f"none of the tile sizes {tuple(candidates)} up to {base} divides {num_rows} rows")


def _in_tiles(function: RowFunction, inputs: tuple[Tensor, ...], order: Tensor, size: int) -> tuple[Tensor, ...]:
    ordered = [rows[order.to(rows.device)] for rows in inputs]
    tiles = [function(*(rows[at : at + size] for rows in ordered)) for at in range(0, len(order), size)]
    return tuple(torch.cat(parts) for parts in zip(*tiles, strict=True))


def _equal(found: tuple[Tensor, ...], reference: tuple[Tensor, ...], order: Tensor) -> bool:
    return all(torch.equal(mine, base[order.to(base.device)]) for mine, base in zip(found, reference, strict=True))

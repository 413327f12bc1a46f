"""Row tiles cover all rows, and the probe keeps exactly the sizes that agree."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from workers.kernels.tiles import RowTiles, probe

sizes_strategy = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(sizes_strategy, st.integers(0, 64), st.integers(0, 300))
def test_a_cover_holds_all_rows_in_known_sizes(sizes: list[int], overhead_rows: int, num_rows: int) -> None:
    """Tiles have the given sizes, the largest first, and hold all rows; no tile is empty."""
    tiles = RowTiles(sizes, overhead_rows).cover(num_rows)
    assert set(tiles) <= set(sizes)
    assert list(tiles) == sorted(tiles, reverse=True)
    assert sum(tiles) >= num_rows
    assert not tiles or sum(tiles[:-1]) < num_rows


@given(sizes_strategy, st.integers(0, 64), st.integers(1, 40))
def test_a_cover_is_no_dearer_than_any_single_size(sizes: list[int], overhead_rows: int, num_rows: int) -> None:
    """No cover with tiles of one size costs less than the chosen one, up to the largest tile's rows."""
    num_rows = min(num_rows, max(sizes))
    chosen = RowTiles(sizes, overhead_rows).cover(num_rows)
    cost = sum(size + overhead_rows for size in chosen)
    assert all(cost <= -(-num_rows // size) * (size + overhead_rows) for size in sizes)


@given(sizes_strategy, st.integers(1, 100))
def test_running_in_tiles_changes_nothing_but_the_shape_of_calls(sizes: list[int], num_rows: int) -> None:
    """A function of rows gives the same results in tiles as at once, and only sees the given numbers of rows."""
    seen = []

    def double(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(len(a))
        return a * 2, b.flatten(1) + 1

    a, b = torch.arange(num_rows), torch.arange(num_rows * 6).view(num_rows, 2, 3)
    doubled, flat = RowTiles(sizes, 4).run(double, a, b)
    assert torch.equal(doubled, a * 2)
    assert torch.equal(flat, b.flatten(1) + 1)
    assert set(seen) <= set(sizes)


@pytest.mark.parametrize(("sizes", "overhead"), [((), 0), ((0, 4), 0), ((4,), -1)])
def test_impossible_tiles_are_refused(sizes: tuple[int, ...], overhead: int) -> None:
    """No sizes, empty tiles and negative costs raise."""
    with pytest.raises(ValueError, match="no tiles"):
        RowTiles(sizes, overhead)


def rows(num_rows: int) -> tuple[Tensor]:
    return (torch.randn((num_rows, 8), generator=torch.Generator().manual_seed(0)),)


def test_the_probe_drops_sizes_with_other_bits() -> None:
    """A size whose results differ in the last bit is dropped, and all others are kept."""

    def function(x: Tensor) -> tuple[Tensor]:
        return (x * (1 + 2**-23) if len(x) in (1, 8) else x,)

    assert probe(function, rows, (1, 2, 4, 8, 16, 32), 16) == (2, 4, 16, 32)


def test_the_probe_drops_sizes_whose_last_row_differs() -> None:
    """A size whose last row is rounded differently from the other rows is dropped, base or not."""

    def function(x: Tensor) -> tuple[Tensor]:
        if len(x) >= 8:
            x = x.clone()
            x[-1] *= 1 + 2**-23
        return (x,)

    assert probe(function, rows, (1, 2, 4, 8, 16, 32), 16) == (1, 2, 4)


def test_the_probe_always_finds_a_size() -> None:
    """A tile of one row cannot depend on a row's place, so it remains if every other size depends on it."""

    def function(x: Tensor) -> tuple[Tensor]:
        return (x + torch.arange(len(x))[:, None],)

    assert probe(function, rows, (1, 2, 4, 8, 16), 16) == (1,)

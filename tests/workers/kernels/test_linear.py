"""Cancelling layers show in which order a kernel sums, and probing with them drops sizes with another order."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.kernels import linear
from workers.kernels.linear import LinearShape, PlainLinear, cancelling_linear, linear_class, linear_shapes
from workers.kernels.tiles import RowTiles, probe
from workers.models.probing import probe_tiles
from workers.models.random_rows import RowProbe

CPU = torch.device("cpu")
SIZES = (1, *range(4, 64, 4))


class InOrderLinear(PlainLinear):
    """Sums each output from the first input to the last, on any CPU."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        super().__call__(x, residual)  # so that ``linear_shapes`` sees the layer
        return in_order(x, self._weight, self._bias)


class LastOutputBackwardsInFours(InOrderLinear):
    """Sums the last output from the other end if there are four rows."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = super().__call__(x, residual)
        if len(x) == 4:
            y[:, -1] = in_order(x.flip(1), self._weight.flip(1), self._bias)[:, -1]
        return y


def in_order(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` in bfloat16, each float32 sum from its first term to its last."""
    total = torch.zeros(len(x), len(weight)) if bias is None else bias.float().expand(len(x), -1)
    for column in range(x.shape[1]):
        total = total + x[:, column, None].float() * weight[:, column].float()
    return total.bfloat16()


class OneLinear:
    """A decoder of a single linear layer."""

    def __init__(self, layer: linear.Linear, in_features: int) -> None:
        self._probe: RowProbe = (
            lambda x: (layer(x),),
            lambda num_rows: (random_numbers(num_rows, in_features),),
        )

    def row_functions(self) -> list[RowProbe]:
        return [self._probe]

    def head_function(self) -> RowProbe:
        return self._probe


def cancelling(shape: LinearShape, num_rows: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Weight, bias and rows of the cancelling layer."""
    parameters = []

    def take(weight: Tensor, bias: Tensor | None) -> PlainLinear:
        parameters.append((weight, bias))
        return PlainLinear(weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "linear_class", lambda device, dtype: take)
        _, make_rows = cancelling_linear(shape, CPU)
    ((weight, bias),) = parameters
    (rows,) = make_rows(num_rows)
    return weight, bias, rows


def random_numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("in_features", [1, 2, 53, 54])
def test_sums_that_cancel_are_zero(in_features: int, has_bias: bool, dtype: torch.dtype) -> None:
    """Without rounding, each output of a cancelling layer is zero, though its terms are not."""
    weight, bias, rows = cancelling(LinearShape(in_features, 7, has_bias, dtype), num_rows=5)
    assert (rows.shape, rows.dtype, weight.shape) == ((5, in_features), dtype, (7, in_features))
    assert (bias is not None) == has_bias
    constants = [0.0] * 7 if bias is None else bias.tolist()
    for row in rows.double():
        for terms, constant in zip((weight.double() * row).tolist(), constants, strict=True):
            assert math.fsum((*terms, constant)) == 0
    assert weight.any() == (has_bias or in_features > 2)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("in_features", [24, 54, 577])
def test_sums_that_cancel_tell_the_order(in_features: int, has_bias: bool) -> None:
    """Summing backwards changes most bfloat16 results of sums that cancel, and nearly none of ordinary sums."""
    shape = LinearShape(in_features, 40, has_bias, torch.bfloat16)

    def share_changed(weight: Tensor, bias: Tensor | None, x: Tensor) -> float:
        there, back = in_order(x, weight, bias), in_order(x.flip(1), weight.flip(1), bias)
        return (there != back).float().mean().item()

    weight, bias, x = cancelling(shape, num_rows=64)
    assert share_changed(weight, bias, x) > 0.5
    assert share_changed(random_numbers(40, in_features), bias, random_numbers(64, in_features)) < 0.01


def test_linear_shapes_finds_every_kernel() -> None:
    """``linear_shapes`` lists each shape of linear layer that a function runs once, whatever kernel computes it."""
    wide, narrow = (random_numbers(*shape) for shape in ((12, 6), (6, 12)))

    def function(x: Tensor) -> Tensor:
        for layer in (PlainLinear, linear_class(CPU, torch.bfloat16)):
            x = layer(narrow, None)(layer(wide, wide[:, 0].contiguous())(x), residual=x)
        return x

    assert linear_shapes(function, random_numbers(3, 6)) == (
        LinearShape(6, 12, True, torch.bfloat16),
        LinearShape(12, 6, False, torch.bfloat16),
    )


def test_a_size_that_sums_one_output_in_another_order_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 a size with another order of one output's sum is dropped, though few ordinary results show it."""
    weight = random_numbers(30, 54)

    def sizes(layer_class: type[InOrderLinear]) -> list[tuple[int, ...]]:
        monkeypatch.setattr(linear, "linear_class", lambda device, dtype: layer_class)
        model: Any = OneLinear(layer_class(weight, None), 54)
        return [tiles.sizes for tiles in probe_tiles(model, "cpu")]

    for usual, found in zip(sizes(InOrderLinear), sizes(LastOutputBackwardsInFours), strict=True):
        assert 4 in usual
        assert found == tuple(size for size in usual if size != 4)


@pytest.mark.parametrize(("in_features", "out_features"), [(24, 64), (54, 80), (54, 211), (576, 192)])
def test_sizes_that_agree_do_so_on_many_ordinary_rows(in_features: int, out_features: int) -> None:
    """Tile sizes that the cancelling layer keeps on this machine agree on thousands of ordinary bfloat16 rows."""
    shape = LinearShape(in_features, out_features, False, torch.bfloat16)
    with torch.inference_mode():
        sizes = probe(*cancelling_linear(shape, CPU), SIZES, 16)
        layer = linear_class(CPU, torch.bfloat16)(random_numbers(out_features, in_features), None)
        rows = random_numbers(6000, in_features)
        results = [RowTiles([size], 0).run(lambda x: (layer(x),), rows)[0] for size in sizes]
    assert all(torch.equal(results[0], result) for result in results[1:])

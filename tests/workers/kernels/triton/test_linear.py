"""Triton's linear layer: close to float64, and a row's bits are the same in any batch.

The interpreter multiplies with numpy, which has float16 and no bfloat16. Tests that compare bits replace its product by
one with a fixed order of sums.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.workers.triton import interpreted, needs_interpreter, needs_triton, on_cuda, row_by_row, run_interpreted
from workers.kernels.choose import Kernels
from workers.kernels.gpu import Gpu
from workers.kernels.linear import PlainLinear
from workers.kernels.numerics import numerics
from workers.kernels.triton.linear import TILES, LinearTile, TritonLinear, fitting_tiles, run, tile_for

H200 = Gpu(132, 227 * 1024)
SMALL = LinearTile(32, 16, 16, 4, 2)


def numbers(*size: int, seed: int = 0, dtype: torch.dtype = torch.float16, device: str = "cpu") -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    y = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return y if residual is None else y + residual.double()


def assert_close(found: Tensor, wanted: Tensor) -> None:
    """Within one rounding of the result, and a little for the sums."""
    eps, size = torch.finfo(found.dtype).eps, float(wanted.abs().max())
    torch.testing.assert_close(found.double(), wanted, rtol=eps, atol=1e-5 * size)


@needs_interpreter
def test_kernel_in_the_interpreter() -> None:
    """All interpreted tests of this file pass in a process whose Triton interprets."""
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize(("num_rows", "in_features", "out_features"), [(1, 64, 64), (5, 48, 100), (40, 200, 33)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_interpreted_equals_float64(num_rows: int, in_features: int, out_features: int, has_bias: bool) -> None:
    """Any sizes, with and without bias and residual, agree with float64 within one rounding of the result."""
    weight = numbers(out_features, in_features)
    bias = numbers(out_features, seed=1) if has_bias else None
    layer = TritonLinear(weight, bias)
    x = numbers(num_rows, in_features, seed=2)
    for residual in (None, numbers(num_rows, out_features, seed=3)):
        assert_close(layer(x, residual), exact(x, weight, bias, residual))


@interpreted
def test_interpreted_rows_that_are_not_neighbours() -> None:
    """Rows and residuals may be views with any stride, and no rows give no result."""
    weight, x, residual = numbers(64, 64), numbers(9, 128), numbers(9, 130)
    layer = TritonLinear(weight, None)
    wanted = layer(x[:, 64:].contiguous(), residual[:, :64].contiguous())
    assert torch.equal(layer(x[:, 64:], residual[:, :64]), wanted)
    assert torch.equal(layer(x.T.contiguous().T[:, 64:], residual[:, :64]), wanted)
    assert layer(x[:0, :64]).shape == (0, 64)


@interpreted
def test_interpreted_bits_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has the same bits alone and at any place among others, in tiles of other shapes."""
    monkeypatch.setattr(np, "matmul", row_by_row)
    weight, x = numbers(70, 80), numbers(45, 80, seed=1)
    wanted = run(SMALL, x, weight, None, x[:, :70])
    # The interpreter adds a tile's products to the sums at once: tiles of other inputs would sum in another order.
    for tile in (SMALL, replace(SMALL, outputs=64), replace(SMALL, rows=32)):
        assert torch.equal(run(tile, x, weight, None, x[:, :70]), wanted)
        assert torch.equal(run(tile, x[44:], weight, None, x[44:, :70]), wanted[44:])
        assert torch.equal(run(tile, x.flip(0), weight, None, x.flip(0)[:, :70]), wanted.flip(0))


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "tile"),
    [
        (1, 4096, (64, 16)),
        (16, 28672, (64, 16)),
        (17, 4096, (64, 32)),
        (64, 4096, (64, 32)),  # 64 programs of larger tiles would leave half of the processors idle
        (64, 28672, (128, 64)),
        (256, 28672, (128, 256)),
        (8192, 4096, (128, 256)),
    ],
)
def test_tile_fills_the_processors(num_rows: int, num_outputs: int, tile: tuple[int, int]) -> None:
    """The largest tile that occupies nearly all processors is taken, and no tile has many more rows than there are."""
    chosen = tile_for(num_rows, num_outputs, TILES, H200)
    assert (chosen.outputs, chosen.rows) == tile


def test_tiles_fit_the_shared_memory() -> None:
    """A GPU with little shared memory gets fewer loads ahead, and every tile fits."""
    assert fitting_tiles(H200) == TILES
    small = fitting_tiles(Gpu(84, 99 * 1024))
    assert [(tile.outputs, tile.rows) for tile in small] == [(tile.outputs, tile.rows) for tile in TILES]
    assert all(tile.shared_bytes <= 99 * 1024 for tile in small)
    assert len(fitting_tiles(Gpu(84, 48 * 1024))) < len(TILES)


def test_refuses_other_types_and_devices() -> None:
    """float32 weights, and weights on a CPU that does not interpret, raise a ValueError that says so."""
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        TritonLinear(torch.zeros(4, 4), None)


@needs_triton
def test_cuda_needs_no_row_tiles_for_16_bits() -> None:
    """On CUDA layers of 16 bits are Triton's, and rows are independent of the batch; float32 keeps cuBLAS and tiles."""
    cuda = torch.device("cuda")
    bfloat16 = replace(numerics("float32", cuda), activations=torch.bfloat16)
    assert Kernels(bfloat16, cuda, native=False).float_linear is TritonLinear
    assert Kernels(bfloat16, cuda, native=False).rows_are_independent
    assert "triton" in Kernels(bfloat16, cuda, native=False).facts()
    assert Kernels(numerics("float32", cuda), cuda, native=False).float_linear is PlainLinear
    assert not Kernels(numerics("float32", cuda), cuda, native=False).rows_are_independent


@on_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("in_features", "out_features"), [(4096, 4096), (576, 1536), (14336, 4096), (200, 1000)])
def test_cuda_rows_do_not_depend_on_the_batch(in_features: int, out_features: int, dtype: torch.dtype) -> None:
    """On CUDA rows have equal bits alone and in batches of up to 1,000, and agree with float64."""
    weight = numbers(out_features, in_features, dtype=dtype, device="cuda")
    x = numbers(1000, in_features, seed=1, dtype=dtype, device="cuda")
    layer = TritonLinear(weight, None)
    whole = layer(x)
    assert_close(whole, exact(x, weight, None, None))
    for count in (1, 2, 3, 16, 17, 33, 64, 65, 128, 200, 511):
        assert torch.equal(layer(x[:count]), whole[:count])
        assert torch.equal(layer(x[-count:]), whole[-count:])

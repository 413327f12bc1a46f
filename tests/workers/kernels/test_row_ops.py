"""The native row operations agree with torch's, and give a row the same bits in any batch."""

import pytest
import torch
from torch import Tensor

from workers import native
from workers.kernels.row_ops import NativeRowOps, RowOps, TorchRowOps

pytestmark = pytest.mark.skipif(not native.load(), reason=native.describe())

WIDTHS = (1, 7, 8, 64, 577)
FUNCTIONS = ("rms_norm", "layer_norm", "silu", "gelu_tanh", "softmax", "rotate")


def inputs(name: str, num_rows: int, width: int, scale: float = 3.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(width)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    if name == "rotate":
        angles = torch.rand((num_rows, 1, width), generator=generator) * 6.3
        return random(num_rows, 5, 2 * width), angles.cos(), angles.sin()
    return (random(num_rows, 2 * width if name in ("silu", "gelu_tanh") else width),)


def apply(ops: RowOps, name: str, rows: tuple[Tensor, ...]) -> Tensor:
    width = rows[0].shape[-1]
    weight, bias = torch.linspace(0.5, 1.5, width), torch.linspace(-1.0, 1.0, width)
    match name:
        case "rms_norm":
            return ops.rms_norm(rows[0], weight, 1e-5)
        case "layer_norm":
            return ops.layer_norm(rows[0], weight, bias, 1e-5)
        case "silu" | "gelu_tanh":
            return ops.gated(rows[0], "silu" if name == "silu" else "gelu_tanh")
        case "softmax":
            return ops.softmax(rows[0])
        case _:
            return ops.rotate(*rows)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_native_agrees_with_torch(name: str, width: int) -> None:
    """Both implementations of a row operation compute the same function, to float32's accuracy."""
    rows = inputs(name, 9, width)
    expected = apply(TorchRowOps(), name, tuple(part.double() for part in rows)) if name == "softmax" else None
    if expected is None:
        expected = apply(TorchRowOps(), name, rows)
    torch.testing.assert_close(apply(NativeRowOps(), name, rows), expected.float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_the_same_bits_in_any_batch(name: str, width: int) -> None:
    """Neither the number of rows, nor a row's place, nor the number of threads changes a row's bits."""
    rows = inputs(name, 600, width)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = apply(NativeRowOps(), name, rows)
        torch.set_num_threads(1)
        for first, last in ((0, 1), (5, 6), (3, 20), (1, 600)):
            part = apply(NativeRowOps(), name, tuple(tensor[first:last] for tensor in rows))
            assert torch.equal(part, together[first:last])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("value", [0.0, 1e18, -1e18, -100.0, 100.0])
def test_extreme_rows_stay_numbers(value: float) -> None:
    """Zeros and huge numbers give finite results, as in torch."""
    rows = torch.full((2, 24), value)
    for name in ("silu", "gelu_tanh", "softmax", "layer_norm"):
        got, expected = apply(NativeRowOps(), name, (rows,)), apply(TorchRowOps(), name, (rows,))
        assert torch.isfinite(got).all() or not torch.isfinite(expected).all(), name
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_misshapen_parameters_are_refused() -> None:
    """A weight of another width than the rows is an error, not a read beyond its end."""
    with pytest.raises(RuntimeError, match="weight must be 8 numbers"):
        NativeRowOps().rms_norm(torch.ones(2, 8), torch.ones(7), 1e-5)
    with pytest.raises(RuntimeError, match="float32"):
        NativeRowOps().rms_norm(torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8), 1e-5)


@pytest.mark.parametrize("bits", [0x7FC00001, 0x7FFFFFFF, -1])
def test_a_nan_stays_one(bits: int) -> None:
    """A NaN among the inputs gives a NaN, whatever its payload."""
    value = torch.tensor([bits], dtype=torch.int32).view(torch.float32).expand(1, 24).contiguous()
    for name in ("silu", "gelu_tanh", "softmax"):
        assert apply(NativeRowOps(), name, (value,)).isnan().all(), name

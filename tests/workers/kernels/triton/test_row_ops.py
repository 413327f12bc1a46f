"""The Triton row operations agree with torch's in Triton's interpreter.

A process of its own chooses the interpreter before the kernels are imported.
"""

import pytest
import torch
from torch import Tensor

from tests.workers.triton import interpreted, needs_interpreter, run_interpreted
from workers.kernels.row_ops import HeadGains, TorchRowOps
from workers.kernels.triton.row_ops import TritonRowOps

dtypes = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 8e-3)])


@needs_interpreter
def test_kernels_in_the_interpreter() -> None:
    """All interpreted tests of this file pass in a process whose Triton interprets."""
    run_interpreted(__file__)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (2 * torch.randn(shape, generator=generator)).to(dtype)


def close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)


@interpreted
@dtypes
@pytest.mark.parametrize("width", [64, 136, 4096])
def test_interpreted_norms_are_torchs(width: int, dtype: torch.dtype, tolerance: float) -> None:
    """Norms, with a residual and without, agree with torch's float32 to the rounding of the result."""
    x, residual = normal(3, width, dtype=dtype), normal(3, width, dtype=dtype)
    weight, bias = normal(width, dtype=dtype), normal(width + 1, dtype=dtype)[1:]
    exact = TorchRowOps().rms_norm(x.float(), weight.float(), 1e-5)
    close(TritonRowOps().rms_norm(x, weight, 1e-5), exact, tolerance)
    close(TritonRowOps().rms_norm(x, weight, 1e-5, residual), exact + residual.float(), tolerance)
    exact = TorchRowOps().layer_norm(x.float(), weight.float(), bias.float(), 1e-5)
    close(TritonRowOps().layer_norm(x, weight, bias, 1e-5), exact, tolerance)


@interpreted
@dtypes
@pytest.mark.parametrize("width", [8, 96, 1400])
def test_interpreted_activations_are_torchs(width: int, dtype: torch.dtype, tolerance: float) -> None:
    """Gated activations and softmax agree with torch's float32 to the rounding of the result."""
    gate_up = normal(3, 2 * width, dtype=dtype)
    close(TritonRowOps().gated(gate_up, "silu"), TorchRowOps().gated(gate_up.float(), "silu"), tolerance)
    close(TritonRowOps().gated(gate_up, "gelu_tanh"), TorchRowOps().gated(gate_up.float(), "gelu_tanh"), tolerance)
    few = gate_up[:, :5].contiguous()
    close(TritonRowOps().softmax(few), TorchRowOps().softmax(few.float()), tolerance)


@interpreted
@dtypes
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 32), (3, 1, 48), (12, 12, 128)])
@pytest.mark.parametrize(("norms", "rotates"), [(False, True), (True, True), (False, False)])
def test_interpreted_heads_are_placed(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norms: bool,
    rotates: bool,
    slot_dtype: torch.dtype,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """The query is returned, keys and values lie in their tokens' slots, and all other slots keep their numbers."""
    num_tokens, num_slots = 3, 7
    heads = normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    gains = HeadGains(normal(head_dim, dtype=dtype), normal(head_dim, dtype=dtype) + 1, 1e-6) if norms else None
    angles = torch.rand((num_tokens, 1, head_dim // 2)) * 6.3
    cosines = (angles.cos(), angles.sin()) if rotates else ()
    pool = normal(2, num_kv_heads, num_slots, head_dim, dtype=dtype)
    keys, values = pool.clone()
    slots = torch.tensor([5, -1, 2], dtype=slot_dtype)

    ops, exact = TritonRowOps(), TorchRowOps()
    assert ops.place_heads is not None
    found = ops.place_heads(heads, cosines, gains, slots, keys, values)

    query, new_keys, new_values = heads.float().split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if gains is not None:
        query = exact.rms_norm(query, gains.query.float(), gains.eps)
        new_keys = exact.rms_norm(new_keys, gains.key.float(), gains.eps)
    if rotates:
        query, new_keys = exact.rotate(query, *cosines), exact.rotate(new_keys, *cosines)
    close(found, query, tolerance)
    close(keys[:, [5, 2]], new_keys[[0, 2]].transpose(0, 1), tolerance)
    assert torch.equal(values[:, [5, 2]], new_values[[0, 2]].transpose(0, 1).to(dtype))
    others = [0, 1, 3, 4, 6]
    assert torch.equal(keys[:, others], pool[0][:, others])
    assert torch.equal(values[:, others], pool[1][:, others])


@interpreted
def test_interpreted_rows_have_the_same_bits_in_any_batch() -> None:
    """A row's bits are the same alone and within a batch, for every operation."""
    ops, x, weight = TritonRowOps(), normal(5, 64), normal(64)
    for function in (
        lambda rows: ops.rms_norm(rows, weight, 1e-5),
        lambda rows: ops.rms_norm(rows, weight, 1e-5, rows),
        lambda rows: ops.layer_norm(rows, weight, weight, 1e-5),
        lambda rows: ops.gated(rows, "silu"),
        ops.softmax,
    ):
        together = function(x)
        assert all(torch.equal(function(x[row : row + 1]), together[row : row + 1]) for row in range(len(x)))


@interpreted
def test_interpreted_misfits_are_refused() -> None:
    """Rows that are not aligned, and shapes that do not fit together, are errors in one line."""
    ops = TritonRowOps()
    with pytest.raises(ValueError, match="not aligned to 16 bytes"):
        ops.rms_norm(normal(2, 7), normal(7), 1e-5)
    with pytest.raises(ValueError, match="residual"):
        ops.rms_norm(normal(2, 8), normal(8), 1e-5, normal(1, 8))
    assert ops.place_heads is not None
    with pytest.raises(ValueError, match="slots"):
        ops.place_heads(normal(2, 4, 16), (), None, torch.zeros(3), normal(1, 5, 16), normal(1, 5, 16))

"""The kernel for stacked and packed weights agrees with torch's products, and a row's bits do not depend on the batch.

Interpreted tests run in a process of its own, which chooses the interpreter before the import.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.triton import HAS_TRITON, INTERPRETED, interpreted, needs_interpreter, row_by_row, run_interpreted
from workers.kernels.grouped_weight import GroupedWeight
from workers.kernels.triton.grouped import (
    CompactLinear,
    SortedRows,
    StackedWeight,
    add_experts,
    agreeing_rows,
    choose_experts,
    pack,
    run,
)

on_cuda = pytest.mark.skipif(
    not HAS_TRITON or INTERPRETED or not torch.cuda.is_available(), reason="needs CUDA and triton"
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
IN, OUT, GROUP = 256, 100, 64
KINDS = (
    "int4",
    "int4, zeros",
    "int4, one group",
    "int4, small groups",
    "int4, act-order",
    "int8",
    "int8, signed",
    "fp8",
)


def random_weight(kind: str, num_outputs: int = OUT, seed: int = 0) -> GroupedWeight:
    generator = torch.Generator().manual_seed(seed)
    bits = 4 if kind.startswith("int4") else 8
    group = {"int4, one group": IN, "int4, small groups": 32}.get(kind, GROUP)
    shape, groups = (num_outputs, IN), (num_outputs, IN // group)
    scales = torch.rand(groups, generator=generator) + 0.5
    if kind == "fp8":
        return GroupedWeight(torch.randn(shape, generator=generator).to(torch.float8_e4m3fn), None, scales, group)
    if kind == "int8, signed":
        signed = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
        return GroupedWeight(signed, None, scales.half().float(), group)
    numbers = torch.randint(0, 1 << bits, shape, generator=generator).to(torch.uint8)
    zeros = torch.full(groups, 1 << (bits - 1), dtype=torch.int16)
    if kind == "int4, zeros":
        zeros = torch.randint(0, 17, groups, generator=generator).to(torch.int16)
    shuffled = (torch.arange(IN) // group)[torch.randperm(IN, generator=generator)]
    return GroupedWeight(numbers, zeros, scales, group, shuffled if kind == "int4, act-order" else None, bits)


def rows_of(num_rows: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(num_rows, IN, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def packed(*weights: GroupedWeight) -> StackedWeight:
    found = pack(weights, DEVICE)
    assert found is not None
    return found


def check_product(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    weight, x = random_weight(kind), rows_of(37, dtype)
    bias, residual = torch.randn(OUT).to(DEVICE, dtype), torch.randn(37, OUT).to(DEVICE, dtype)
    found = CompactLinear(packed(weight), bias, dtype)(x, residual)
    wanted = x.double() @ weight.floats().to(DEVICE).double().T + bias.double() + residual.double()
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * float(wanted.std()))


@needs_interpreter
def test_kernels_in_the_interpreter() -> None:
    """All interpreted tests of this file pass in a process whose Triton interprets."""
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_interpreted_packed_weights_equal_their_floats(kind: str) -> None:
    """A layer of packed numbers, with bias and residual, agrees with the product of the floats they stand for."""
    check_product(kind, torch.float32, 1e-5)


@interpreted
def test_interpreted_layers_are_joined() -> None:
    """Several layers as one have their outputs one after another."""
    weights = [random_weight("int4, zeros", outputs, seed=outputs) for outputs in (40, 8, 16)]
    x = rows_of(5)
    wanted = torch.cat([CompactLinear(packed(weight), None, x.dtype)(x) for weight in weights], 1)
    joined = CompactLinear(packed(*weights), None, x.dtype)(x)
    torch.testing.assert_close(joined, wanted, rtol=1e-5, atol=1e-4)  # BLAS sums in other orders in other shapes


@pytest.mark.parametrize(
    ("first", "second"), [("int4", "int8"), ("int4", "int4, one group"), ("int4", "int4, act-order"), ("int8", "fp8")]
)
def test_layers_that_differ_are_not_joined(first: str, second: str) -> None:
    """Layers of other numbers, groups or orders cannot be one layer, so their floats are used."""
    assert pack([random_weight(first), random_weight(second)], torch.device("cpu")) is None


def test_groups_that_do_not_fill_a_tile_are_not_packed() -> None:
    """Groups of too few inputs, or of unequal numbers of inputs, are left to floats."""
    weight = random_weight("int4")
    cpu = torch.device("cpu")
    assert pack([GroupedWeight(weight.numbers, None, torch.ones(OUT, 16), 16, bits=4)], cpu) is None
    assert pack([GroupedWeight(weight.numbers, None, torch.ones(OUT, 3), 96, bits=4)], cpu) is None
    order = torch.zeros(IN, dtype=torch.int64)
    assert pack([GroupedWeight(weight.numbers, None, torch.ones(OUT, 4), GROUP, order, 4)], cpu) is None


EXPERTS, RANKS = 5, 2


def expert_rows(num_tokens: int, seed: int = 3) -> tuple[Tensor, SortedRows]:
    """Each token's experts, of which one has no rows."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:RANKS] for _ in range(num_tokens)])
    experts = experts.to(DEVICE)
    return experts, SortedRows.by_expert(experts, torch.arange(EXPERTS + 1, device=DEVICE))


def stacked(dtype: torch.dtype) -> StackedWeight:
    numbers = torch.randn(EXPERTS, OUT, IN, generator=torch.Generator().manual_seed(4))
    return StackedWeight("plain", numbers.to(DEVICE, dtype), IN)


def check_experts(dtype: torch.dtype, tolerance: float) -> None:
    x, weight = rows_of(50, dtype), stacked(dtype)
    experts, rows = expert_rows(50)
    gathered = run(x, weight, rows, gathers=True)
    wanted = torch.stack([weight.numbers[e].double() @ x[t].double() for t in range(50) for e in experts[t]])
    largest = tolerance * float(wanted.std())
    torch.testing.assert_close(gathered.double(), wanted[rows.order], rtol=tolerance, atol=largest)
    in_order = run(x.repeat_interleave(RANKS, 0)[rows.order], weight, rows, scatters=True)
    torch.testing.assert_close(in_order.double(), wanted, rtol=tolerance, atol=largest)


@interpreted
def test_interpreted_experts_equal_their_products() -> None:
    """Rows that are gathered, or whose results are scattered, are multiplied by their expert's weight."""
    check_experts(torch.float32, 1e-5)


@interpreted
def test_interpreted_results_are_added_in_order_of_rank() -> None:
    """Results times shares are added to the residual."""
    results, shares, residual = torch.randn(6, 1500), torch.rand(3, 2), torch.randn(3, 1500)
    wanted = residual + results[0::2] * shares[:, :1] + results[1::2] * shares[:, 1:]
    torch.testing.assert_close(add_experts(results, shares, residual), wanted)


@interpreted
@pytest.mark.parametrize("num_experts", [6, 128])
@pytest.mark.parametrize("normalizes", [True, False])
def test_interpreted_best_experts_are_chosen(num_experts: int, normalizes: bool) -> None:
    """The best experts of a row are chosen by their softmax, the lower number first among equals."""
    logits = torch.randn(5, num_experts, generator=torch.Generator().manual_seed(6)) * 2
    logits[3] = 0.5
    shares, experts = choose_experts(logits, 3, normalizes)
    wanted, numbers = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(experts, numbers[:, :3])
    wanted = wanted[:, :3] / (wanted[:, :3].sum(-1, keepdim=True) if normalizes else 1.0)
    torch.testing.assert_close(shares, wanted)


@interpreted
@pytest.mark.parametrize("kind", ["plain", "int4, zeros", "fp8"])
def test_interpreted_bits_do_not_depend_on_the_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has equal bits in any batch and in tiles of any size, if a product's rows have."""
    monkeypatch.setattr(np, "matmul", row_by_row)
    weight = packed(random_weight(kind)) if kind != "plain" else StackedWeight("plain", torch.randn(1, OUT, IN), IN)
    x = rows_of(40)
    whole = run(x, weight, tile_rows=16)
    for tile_rows in (32, 64):
        assert torch.equal(run(x, weight, tile_rows=tile_rows), whole)
    assert torch.equal(run(x[7:9], weight), whole[7:9])


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_packed_weights_equal_their_floats(kind: str) -> None:
    """On CUDA a layer of packed numbers agrees with the product of the floats they stand for."""
    check_product(kind, torch.bfloat16, 1e-2)


@pytest.mark.gpu
@on_cuda
def test_cuda_experts_equal_their_products() -> None:
    """On CUDA rows are multiplied by their expert's weight, and the host waits for nothing."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        expert_rows(50)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check_experts(torch.bfloat16, 1e-2)


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("kind", ["int4, zeros", "int8", "fp8"])
def test_cuda_bits_do_not_depend_on_the_batch(kind: str) -> None:
    """On CUDA a row has equal bits in any batch, and tiles of several sizes agree."""
    weight, x = packed(random_weight(kind)), rows_of(300, torch.bfloat16)
    whole = run(x, weight)
    for first, last in ((0, 1), (7, 24), (100, 160)):
        assert torch.equal(run(x[first:last], weight), whole[first:last])
    assert len(agreeing_rows(DEVICE, torch.bfloat16, weight.form)) > 1

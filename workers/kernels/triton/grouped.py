"""Products of rows with stacked or packed weights on CUDA, by one Triton kernel whose rows do not depend on the batch.

Stacked: a weight for each expert of a mixture, and rows that are sorted by expert on the device, so that the host waits
for nothing. Packed: integers of 4 or 8 bits or FP8 numbers with a scale for each group of inputs, as quantized
checkpoints have them. They are read as they are and multiplied in the activations' type, which represents each of them
exactly. So decode reads a quarter or half of the bytes, on every GPU; prefill computes as fast as with plain weights.

As in a plain linear layer, a program sums all inputs of its outputs in order, and the number of rows only chooses how
many columns the instruction has. A start compares the tiles' bits on the GPU, and leaves out tiles that differ.
"""

import importlib.util
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, Literal

import torch
from torch import Tensor

from workers.kernels.grouped_weight import GroupedWeight

_log = logging.getLogger(__name__)

Form = Literal["plain", "int4", "int8", "fp8"]

DTYPES: Final = (torch.bfloat16, torch.float16)
"""Of the activations."""

_FORMS: Final[dict[Form, int]] = {"plain": 0, "int4": 1, "int8": 2, "fp8": 3}  # the kernel's constants
_TILE_OUTPUTS: Final = 64
# Rows of a tile: warps, and stages of loading, which fit 99 KiB of shared memory but 112 KiB on sm_90.
_TILES: Final = {16: (4, 8), 32: (4, 6), 64: (4, 4), 128: (8, 3)}
_MAX_TILE_INPUTS: Final = {"plain": 64, "int4": 128, "int8": 128, "fp8": 128}
_LEAST_TILE_INPUTS: Final = 32  # two halves of int4 have 16 inputs each
_FP8_FACTOR = 256.0  # the kernel reads FP8 numbers as float16, whose exponents are 8 less
_ADD_BLOCK = 1024
_TRIAL_INPUTS, _TRIAL_ROWS = 1024, 300


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """The weights of E experts, or of one layer, [E, O, I], in the kernel's form on the device.

    A byte of int4 has the input i of a tile in its lower half, and input i + tile_inputs / 2 in its upper half.
    """

    form: Form
    numbers: Tensor  # [E, O, I] floats or bytes; int4: [E, O, I / 2] bytes
    in_features: int
    scales: Tensor | None = None  # [E, O, G] float16 or float32; of FP8 times 2**8
    zeros: Tensor | None = None  # [E, O, G] int16; None: the middle of the range
    group_inputs: int = 0
    inputs: Tensor | None = None  # [I] int64: the input at each place, if they are not in order

    @property
    def num_experts(self) -> int:
        return len(self.numbers)

    @property
    def out_features(self) -> int:
        return self.numbers.shape[1]

    @property
    def tile_inputs(self) -> int:
        return _tile_inputs(self.form, self.group_inputs or self.in_features)


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows in order of their experts. ``order`` [P] int64: the place of the p-th row among (token, rank) pairs;
    ``starts`` [E + 1] int32: where each expert's rows begin.
    """

    order: Tensor
    starts: Tensor
    ranks: int

    @classmethod
    def by_expert(cls, experts: Tensor, numbers: Tensor) -> "SortedRows":
        """``experts``: [T, ranks] int64. ``numbers``: 0 to E, int64 on the device. Nothing waits for the device."""
        sorted_experts, order = experts.flatten().sort(stable=True)
        return cls(order, torch.searchsorted(sorted_experts, numbers, out_int32=True), experts.shape[1])


class CompactLinear:
    """``x @ weight.T + bias + residual`` with the packed weight of a quantized checkpoint."""

    def __init__(self, weight: StackedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        """``weight``: of one expert; ``bias``: [out_features]; ``dtype``: of the activations."""
        self._weight = weight
        self._bias = bias
        agreeing_rows(weight.numbers.device, dtype, weight.form)  # found now, because it waits for the device

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._weight.inputs is not None:
            x = x.index_select(1, self._weight.inputs)
        return run(x, self._weight, bias=self._bias, residual=residual)


def pack(weights: Sequence[GroupedWeight], device: torch.device) -> StackedWeight | None:
    """The layers of these weights as one layer, their outputs one after another, in the kernel's form.

    None if the kernel does not take them: they differ in their groups, or groups are too small or of unequal size.
    """
    first = weights[0]
    if not all(_alike(weight, first) for weight in weights):
        return None
    all_zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    joined = replace(
        first,
        numbers=torch.cat([weight.numbers for weight in weights]),
        zeros=torch.cat(all_zeros) if all_zeros else None,
        scales=torch.cat([weight.scales for weight in weights]),
    )
    in_features = joined.numbers.shape[1]
    form: Form = "int4" if joined.bits == 4 else "int8"
    if joined.numbers.dtype == torch.float8_e4m3fn:
        form = "fp8"
    tile_inputs = _tile_inputs(form, joined.group_inputs)
    if tile_inputs < _LEAST_TILE_INPUTS or in_features % joined.group_inputs:
        return None
    inputs = None
    if joined.group_of_input is not None:
        sizes = joined.group_of_input.bincount(minlength=joined.scales.shape[1])
        if not bool((sizes == joined.group_inputs).all()):
            return None
        inputs = joined.group_of_input.argsort(stable=True)
        joined = replace(joined, numbers=joined.numbers[:, inputs], group_of_input=None)
    scales, zeros, numbers = joined.scales, joined.zeros, joined.numbers
    if form == "fp8":
        numbers, scales = numbers.view(torch.uint8), scales * _FP8_FACTOR
    elif numbers.dtype == torch.int8:
        numbers = (numbers.view(torch.uint8) ^ 0x80).contiguous()  # less 128, the middle, they are the same numbers
    if form == "int4":
        halves = numbers.view(len(numbers), -1, 2, tile_inputs // 2)
        numbers = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    if zeros is not None and bool((zeros == 1 << (joined.bits - 1)).all()):
        zeros = None
    half = scales.half()
    scales = half if torch.equal(half.float(), scales) else scales
    return StackedWeight(
        form=form,
        numbers=numbers.contiguous().to(device)[None],
        in_features=in_features,
        scales=scales.contiguous().to(device)[None],
        zeros=None if zeros is None else zeros.contiguous().to(device)[None],
        group_inputs=joined.group_inputs,
        inputs=None if inputs is None else inputs.to(device),
    )


def stack(layers: Sequence[StackedWeight]) -> StackedWeight | None:
    """Layers as the experts of one weight; None if there is none, or they differ in more than their numbers."""
    if not layers:
        return None
    first = layers[0]

    def facts(layer: StackedWeight) -> tuple[object, ...]:
        dtype = None if layer.scales is None else layer.scales.dtype
        return layer.form, layer.numbers.shape, layer.group_inputs, dtype, layer.zeros is None, layer.inputs is None

    if first.inputs is not None or any(facts(layer) != facts(first) for layer in layers):
        return None
    scales = [layer.scales for layer in layers if layer.scales is not None]
    zeros = [layer.zeros for layer in layers if layer.zeros is not None]
    return replace(
        first,
        numbers=torch.cat([layer.numbers for layer in layers]),
        scales=torch.cat(scales) if scales else None,
        zeros=torch.cat(zeros) if zeros else None,
    )


def run(
    x: Tensor,
    weight: StackedWeight,
    rows: SortedRows | None = None,
    *,
    gathers: bool = False,
    scatters: bool = False,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tile_rows: int | None = None,
) -> Tensor:
    """[R, in_features] -> [R, out_features] in ``dtype``, by default that of ``x``. Bias and residual are added before
    it is rounded.

    ``rows``: each row's expert. If it ``gathers``, ``x`` has a row for each token, and row p of the result is that of
    the p-th pair. If it ``scatters``, row p of ``x`` is that of the p-th pair, and the results are in order of the
    pairs.
    """
    num_rows = len(x) if rows is None else len(rows.order)
    out = torch.empty((num_rows, weight.out_features), dtype=dtype or x.dtype, device=x.device)
    if num_rows == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
    tile_rows = tile_rows or _rows_for(num_rows / weight.num_experts, agreeing_rows(x.device, x.dtype, weight.form))
    num_warps, num_stages = _TILES[tile_rows]
    num_row_tiles = -(-num_rows // tile_rows)
    if rows is not None:  # an upper bound, because only the device knows the experts' rows
        num_row_tiles = num_rows // tile_rows + min(weight.num_experts, num_rows)
    _kernels().grouped_linear[(num_row_tiles * -(-weight.out_features // _TILE_OUTPUTS),)](
        x,
        weight.numbers,
        weight.scales,
        weight.zeros,
        bias,
        residual,
        out,
        None if rows is None else rows.order,
        None if rows is None else rows.starts,
        num_rows,
        num_row_tiles,
        weight.num_experts,
        weight.in_features,
        weight.out_features,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        form=_FORMS[weight.form],
        middle=8 if weight.form == "int4" else 128,
        group_inputs=weight.group_inputs or weight.in_features,
        padded_experts=_next_power_of_two(weight.num_experts),
        gathered_ranks=rows.ranks if rows is not None and gathers else 0,
        scatters=scatters,
        tile_out=_TILE_OUTPUTS,
        tile_rows=tile_rows,
        tile_in=weight.tile_inputs,
        num_warps=num_warps,
        num_stages=num_stages,
        enable_fp_fusion=False,
    )
    return out


def choose_experts(logits: Tensor, ranks: int, normalizes: bool) -> tuple[Tensor, Tensor]:
    """``logits`` [T, E] float32 -> each row's best experts, [T, ranks]: softmax shares (float32) and numbers (int64).

    The best expert comes first, among equals the lower number. ``normalizes``: divide the shares by their sum.
    """
    num_rows, num_experts = logits.shape
    shares = torch.empty((num_rows, ranks), device=logits.device)
    experts = torch.empty((num_rows, ranks), dtype=torch.int64, device=logits.device)
    if num_rows:
        _kernels().choose_experts[(num_rows,)](
            logits,
            shares,
            experts,
            num_experts,
            padded_experts=_next_power_of_two(num_experts),
            ranks=ranks,
            padded_ranks=_next_power_of_two(ranks),
            normalizes=normalizes,
            num_warps=1,
        )
    return shares, experts


def add_experts(results: Tensor, shares: Tensor, residual: Tensor) -> Tensor:
    """``residual`` [T, hidden] plus the sum over ranks of ``results`` [T * ranks, hidden] times ``shares`` [T, ranks]
    (float32), in order of rank, in float32 and rounded once.
    """
    num_rows, hidden = residual.shape
    out = torch.empty((num_rows, hidden), dtype=residual.dtype, device=residual.device)
    if num_rows:
        residual = residual if residual.stride(1) == 1 else residual.contiguous()
        _kernels().add_experts[(num_rows, -(-hidden // _ADD_BLOCK))](
            results,
            shares.contiguous(),
            residual,
            out,
            hidden,
            residual.stride(0),
            ranks=shares.shape[1],
            block=_ADD_BLOCK,
            enable_fp_fusion=False,
        )
    return out


@cache
def agreeing_rows(device: torch.device, dtype: torch.dtype, form: Form) -> tuple[int, ...]:
    """The numbers of rows in a tile that give a row the bits of the smallest tile: found by running all on the device.

    The trial's exact sums are all zero, so a result is the rounding error of its sum, which another order changes.
    """
    if device.type != "cuda":
        return tuple(_TILES)
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(1, 15, (_TILE_OUTPUTS, _TRIAL_INPUTS // 2), generator=generator)
    rows = torch.randn(_TRIAL_ROWS, _TRIAL_INPUTS // 2, generator=generator)
    rows *= torch.randint(-8, 9, rows.shape, generator=generator).exp2()
    numbers = torch.cat((half, 16 - half), 1)
    if form == "plain":
        weight = StackedWeight("plain", (numbers - 8).to(device, dtype)[None], _TRIAL_INPUTS)
    else:
        stored = {"int4": numbers, "int8": numbers + 120, "fp8": numbers - 8}[form]
        stored = stored.float().to(torch.float8_e4m3fn) if form == "fp8" else stored.to(torch.uint8)
        ones = torch.ones(_TILE_OUTPUTS, 1)
        found = pack([GroupedWeight(stored, None, ones, _TRIAL_INPUTS, bits=4 if form == "int4" else 8)], device)
        assert found is not None
        weight = found
    x = torch.cat((rows, rows), 1).to(device, dtype)
    wanted = run(x, weight, tile_rows=min(_TILES))
    agreeing = tuple(size for size in _TILES if torch.equal(run(x, weight, tile_rows=size), wanted))
    if len(agreeing) < len(_TILES):
        _log.warning("this GPU computes %s weights with other bits in tiles of other than %s rows", form, agreeing)
    return agreeing


def _alike(a: GroupedWeight, b: GroupedWeight) -> bool:
    """Whether two weights can be one layer."""
    order = a.group_of_input
    if order is None or b.group_of_input is None:
        same_order = order is b.group_of_input
    else:
        same_order = torch.equal(order, b.group_of_input)
    facts = [(w.numbers.dtype, w.numbers.shape[1], w.zeros is None, w.group_inputs, w.bits) for w in (a, b)]
    return same_order and facts[0] == facts[1]


def _tile_inputs(form: Form, group_inputs: int) -> int:
    """How many inputs a program multiplies at a time: they share their scales."""
    largest = _MAX_TILE_INPUTS[form]
    return largest if form == "plain" else min(largest, group_inputs & -group_inputs)


def _rows_for(rows_per_expert: float, sizes: tuple[int, ...]) -> int:
    """The smallest tile that holds an expert's rows, or the largest tile."""
    return next((size for size in sizes if size >= rows_per_expert), sizes[-1])


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _kernels() -> Any:
    return importlib.import_module("workers.kernels.triton.grouped_kernel")


def can_run(device: torch.device) -> bool:
    """Whether this machine has what runs the kernels."""
    is_there = importlib.util.find_spec("triton") is not None
    return is_there and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")

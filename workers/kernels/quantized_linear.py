"""Linear layers of 8-bit inputs and 8- or 4-bit weights. Sums are int32, so every kernel gives the same bits.

Inputs and weights are first rotated by a block-Hadamard matrix, which spreads outliers over their block and does not
change the product (QuaRot, Ashkboos et al., 2024, section 4). QuaRot folds most rotations into the weights of the layer
before. We compute all of them, so that a linear layer needs no knowledge of its model. Then each row of inputs gets its
own scale, as each row of weights has one (symmetric, 8 bits).

4-bit weights are a compact form of 8-bit weights: q8 = q4 * g, where 16 neighbouring inputs of a column share the
integer g.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workers import native

MAX_IN_FEATURES = 2**17
"""127 * 127 * 2**17 is the largest such sum below 2**31."""

_MAX_BLOCK = 512
_PANEL_COLUMNS = 16
_GROUP_INPUTS = 16
_SMALLEST_AMAX = 2.0**-100  # a row whose largest magnitude is smaller counts as zeros: 127 / amax stays finite
_INPUT_OFFSET = 128  # kernels take inputs as unsigned bytes
_ELEMENTS_AT_A_TIME = 2**19  # while a weight is quantized: 2 MiB of floats
_EXACT_INPUTS = 1024  # 127 * 127 * 1024 < 2**24: every partial sum is a whole number that a float32 can hold
_CLIPS = (1.1, 1.0, 0.9)  # of a group's largest weight: each gives a g to try


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A linear layer's weights: plain contiguous tensors that can be written to a file and mapped from it.

    Columns are the layer's outputs. ``packed`` holds them in panels of 16. Zeros pad the last panel, and the inputs to
    a multiple of 4 (int8) or 16 (int4):

    int8: [panels, in_features / 4, 16 columns, 4 inputs];
    int4: [panels, in_features / 8, 16 columns, 4 inputs], each byte the signed nibbles of inputs i (lower) and i + 4.
    """

    packed: Tensor  # int8, flat
    group_scales: Tensor | None  # int4 only: g, int8 [panels, in_features / 16, 16 columns], flat
    column_scales: Tensor  # float32 [out_features]; the rotation's normalisation is in them
    column_sums: Tensor  # int32 [out_features]: 128 times the sum of a column's weights
    bias: Tensor | None  # float32 [out_features]
    in_features: int
    out_features: int
    bits: int


def quantize(weight: Tensor, bias: Tensor | None, bits: int) -> QuantizedWeight:
    """``weight``: [out_features, in_features] of any float type, on the CPU; bias: [out_features].

    It works on some rows at a time, so it needs only a few megabytes in addition to the result.

    Raises: ValueError if a weight is not finite, in_features exceeds MAX_IN_FEATURES, or bits is neither 8 nor 4.
    """
    out_features, in_features = weight.shape
    if bits not in (8, 4):
        raise ValueError(f"weights of {bits} bits: there are 8 and 4")
    if in_features > MAX_IN_FEATURES:
        raise ValueError(f"{in_features} inputs: int32 holds the sums of {MAX_IN_FEATURES}")
    num_panels = -(-out_features // _PANEL_COLUMNS)
    multiple = 4 if bits == 8 else _GROUP_INPUTS
    padded = -(-in_features // multiple) * multiple
    packed = torch.zeros((num_panels, padded * bits // 8, _PANEL_COLUMNS), dtype=torch.int8)
    group_scales = None
    if bits == 4:
        group_scales = torch.zeros((num_panels, padded // _GROUP_INPUTS, _PANEL_COLUMNS), dtype=torch.int8)
    column_scales = torch.empty(out_features)
    column_sums = torch.empty(out_features, dtype=torch.int32)

    panels_at_a_time = max(1, _ELEMENTS_AT_A_TIME // (padded * _PANEL_COLUMNS))
    for panel in range(0, num_panels, panels_at_a_time):
        some = slice(panel, panel + panels_at_a_time)
        columns = slice(panel * _PANEL_COLUMNS, min((panel + panels_at_a_time) * _PANEL_COLUMNS, out_features))
        rotated = _rotate(weight[columns].float().contiguous())
        if group_scales is None:
            expanded, scales = _quantize_rows(rotated)
            packed[some] = _panels_of(expanded, padded)
        else:
            nibbles, groups, scales = _quantize_groups(rotated, padded)
            expanded = _expand(nibbles, groups)
            packed[some] = _join_nibbles(_panels_of(nibbles, padded))
            group_scales[some] = _by_panel(groups)
        column_scales[columns] = scales / _block(in_features)
        column_sums[columns] = expanded.sum(1, dtype=torch.int32) * _INPUT_OFFSET
    if not bool(column_scales.isfinite().all()):
        raise ValueError("a weight is not finite")
    return QuantizedWeight(
        packed=packed.flatten(),
        group_scales=None if group_scales is None else group_scales.flatten(),
        column_scales=column_scales,
        column_sums=column_sums,
        bias=None if bias is None else bias.float().contiguous(),
        in_features=in_features,
        out_features=out_features,
        bits=bits,
    )


class QuantizedLinear:
    """``x @ weight.T + bias``, by the native kernel, or by torch's own kernels with equal bits.

    A row with an infinity or a NaN gives NaN, without effect on other rows. A row whose largest rotated magnitude is
    below 2**-100 counts as zeros.
    """

    def __init__(self, weight: QuantizedWeight) -> None:
        self._weight = weight
        self._block = _block(weight.in_features)
        self._run: Callable[[Tensor, Tensor | None], Tensor]
        if native.load():
            self._operator = torch.ops.actorserve.quantized_linear.default
            self._run = self._run_native
        else:
            self._product = _ExactProduct(weight)
            self._run = self._run_torch

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[R, in_features] float32 -> [R, out_features] float32, plus ``residual`` of that shape."""
        return self._run(x, residual)

    def _run_native(self, x: Tensor, residual: Tensor | None) -> Tensor:
        weight = self._weight
        if x.shape[-1] != weight.in_features:
            raise ValueError(f"inputs of {x.shape[-1]} numbers: the layer has {weight.in_features}")
        y: Tensor = self._operator(
            x,
            weight.packed,
            weight.group_scales,
            weight.column_scales,
            weight.column_sums,
            weight.bias,
            residual,
            self._block,
        )
        return y

    def _run_torch(self, x: Tensor, residual: Tensor | None) -> Tensor:
        quantized, row_scales = _quantize_rows(_rotate_by_torch(x, self._block))
        y = self._product(quantized).float().mul_(row_scales[:, None]).mul_(self._weight.column_scales)
        if self._weight.bias is not None:
            y += self._weight.bias
        return y if residual is None else y.add_(residual)


class _ExactProduct:
    """Products of 8-bit integers by torch's own kernels, exact in int32."""

    def __init__(self, weight: QuantizedWeight) -> None:
        expanded = expand(weight)
        # oneDNN multiplies bytes on CPUs with VNNI (but it mistakes a matrix of one input for its transpose).
        # On other CPUs torch multiplies bytes in a naive loop, and has good kernels for floats.
        use_integers = native.has_vnni() and weight.in_features > 1
        self._integers = expanded.t() if use_integers else None
        chunks = () if self._integers is not None else torch.split(expanded.float(), _EXACT_INPUTS, dim=1)
        self._chunks = tuple(chunk.contiguous() for chunk in chunks)

    def __call__(self, x: Tensor) -> Tensor:
        """int8 [R, in_features] -> int32 [R, out_features]."""
        if self._integers is not None:
            return torch._int_mm(x, self._integers)
        chunks = zip(torch.split(x.float(), _EXACT_INPUTS, dim=1), self._chunks, strict=True)
        products = [torch.nn.functional.linear(part, chunk).int() for part, chunk in chunks]
        return products[0] if len(products) == 1 else torch.stack(products).sum(0, dtype=torch.int32)


def expand(weight: QuantizedWeight) -> Tensor:
    """The 8-bit weights, [out_features, in_features] int8."""
    num_panels = -(-weight.out_features // _PANEL_COLUMNS)
    if weight.group_scales is None:
        expanded = _columns_of(weight.packed.view(num_panels, -1, _PANEL_COLUMNS, 4))
    else:
        pairs = weight.packed.view(num_panels, -1, 1, _PANEL_COLUMNS, 4)
        nibbles = _columns_of(torch.cat((pairs << 4 >> 4, pairs >> 4), dim=2).flatten(1, 2))
        groups = weight.group_scales.view(num_panels, -1, _PANEL_COLUMNS).transpose(1, 2).flatten(0, 1)
        expanded = _expand(nibbles, groups)
    return expanded[: weight.out_features, : weight.in_features].contiguous()


def _block(in_features: int) -> int:
    """The rotation's block: the largest power of two that divides ``in_features``, at most 512."""
    return min(in_features & -in_features, _MAX_BLOCK)


def _rotate(x: Tensor) -> Tensor:
    """[R, in_features]: each block's Walsh-Hadamard transform, not normalised."""
    block = _block(x.shape[1])
    if native.load():
        rotated: Tensor = torch.ops.actorserve.rotate_rows.default(x, block)
        return rotated
    return _rotate_by_torch(x, block)


def _rotate_by_torch(x: Tensor, block: int) -> Tensor:
    """The native kernel's sums and differences, in the same order."""
    y, stride = x, 1
    while stride < block:
        a, b = y.reshape(-1, 2, stride).unbind(1)
        y, stride = torch.stack((a + b, a - b), dim=1), 2 * stride
    return y.reshape(x.shape)


def _quantize_rows(rotated: Tensor) -> tuple[Tensor, Tensor]:
    """[R, in_features] -> int8 of that shape, and float32 scales [R]; see ``quantize_row`` in native/quantize.h."""
    amax = rotated.abs().amax(1)
    finite, used = amax.isfinite(), amax >= _SMALLEST_AMAX
    # Divide a tensor by a tensor, because torch divides a number by a tensor in two roundings.
    factors = torch.full_like(amax, 127.0) / torch.where(used, amax, 1.0)
    values = torch.where((finite & used)[:, None], rotated * factors[:, None], 0.0)
    scales = torch.where(used, amax / 127.0, 0.0).masked_fill(~finite, torch.nan)
    return values.round_().to(torch.int8), scales


def _quantize_groups(rotated: Tensor, padded: int) -> tuple[Tensor, Tensor, Tensor]:
    """[R, in_features] -> q4 int8 [R, padded], g int8 [R, padded / 16], float32 scales [R]."""
    num_rows, in_features = rotated.shape
    groups = torch.nn.functional.pad(rotated, (0, padded - in_features)).view(num_rows, -1, _GROUP_INPUTS)
    lowest, highest = groups.aminmax(dim=2)
    amax = torch.maximum(highest, -lowest)
    largest = amax.amax(1)
    used = largest >= _SMALLEST_AMAX
    # The largest group gets g = 15 at its full range: |-8 * 15| <= 127.
    scales = torch.where(used, largest / (8 * 15), 0.0)
    in_steps = groups * torch.where(used, 8 * 15 / largest, 0.0)[:, None, None]
    sign = torch.where(highest > -lowest, -1.0, 1.0)  # the largest weight becomes -8, since that side has one step more
    amax = in_steps.abs().amax(2)
    best = torch.full_like(amax, torch.inf)
    best_g = torch.ones_like(amax)
    for clip in _CLIPS:
        g = (amax * (clip / 8)).round_().clamp_(1, 15).mul_(sign)
        q4 = (in_steps * g.reciprocal()[..., None]).round_().clamp_(-8, 7)
        error = q4.mul_(g[..., None]).sub_(in_steps).square_().sum(2)
        better = error < best
        best = torch.where(better, error, best)
        best_g = torch.where(better, g, best_g)
    nibbles = (in_steps / best_g[..., None]).round_().clamp_(-8, 7)
    return nibbles.flatten(1).to(torch.int8), best_g.to(torch.int8), scales.masked_fill(~largest.isfinite(), torch.nan)


def _expand(nibbles: Tensor, groups: Tensor) -> Tensor:
    """q4 [R, padded], g [R, padded / 16] -> q8."""
    return (nibbles.view(*groups.shape, _GROUP_INPUTS) * groups[..., None]).flatten(1)


def _panels_of(columns: Tensor, padded: int) -> Tensor:
    """int8 [C, in_features] -> [panels, padded, 16], the four bytes of a column together."""
    num_columns, in_features = columns.shape
    columns = torch.nn.functional.pad(columns, (0, padded - in_features, 0, -num_columns % _PANEL_COLUMNS))
    fours = columns.view(torch.int32).view(-1, _PANEL_COLUMNS, padded // 4).transpose(1, 2).contiguous()
    return fours.view(torch.int8).view(len(fours), padded, _PANEL_COLUMNS)


def _columns_of(panels: Tensor) -> Tensor:
    """[panels, padded / 4, 16, 4] -> [columns, padded]."""
    return panels.transpose(1, 2).reshape(len(panels) * _PANEL_COLUMNS, -1)


def _join_nibbles(panels: Tensor) -> Tensor:
    """[panels, padded, 16] -> [panels, padded / 2, 16]."""
    lower, upper = panels.view(len(panels), -1, 2, 4, _PANEL_COLUMNS).unbind(2)
    return ((lower & 0x0F) | (upper << 4)).flatten(1, 2)


def _by_panel(groups: Tensor) -> Tensor:
    """[C, groups] -> [panels, groups, 16]."""
    groups = torch.nn.functional.pad(groups, (0, 0, 0, -len(groups) % _PANEL_COLUMNS))
    return groups.view(-1, _PANEL_COLUMNS, groups.shape[1]).transpose(1, 2)

"""Linear layers on CUDA by one Triton kernel, whose rows do not depend on the batch.

cuBLAS takes another kernel for another number of rows, and its kernels sum in different orders. Here every tile sums
the products of an output in order of the input's number, with the same instruction. The weight is the first factor, so
a row's place and the number of rows only choose columns of the instruction's result. On sm_90 that is ``wgmma`` of
shape m64 nN k16, where N is the tile's rows (16 to 256), and each element of the result is a sum over k alone. On sm_80
and sm_120 it is ``mma.sync`` m16n8k16. A start compares the tiles' bits on the GPU, and leaves out tiles that differ.

The price. Sums are not split over the inputs, because a second set of sums would halve prefill's tiles, and adding up
the parts would be one more launch. So a layer of 4096 outputs has 64 programs for up to 16 rows, and leaves half of an
H200's processors idle. Each busy processor has 80 KiB on their way, enough for about 100 GB/s at a latency of 0.8 us.
Prefill has tiles of 128 x 256, whose reads take 48 bytes in each clock cycle of an sm_90's tensor cores. Loads use no
TMA, as cuBLAS does. No GPU has measured either yet.
"""

import importlib
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import torch
from torch import Tensor

from workers.kernels.gpu import Gpu, gpu_of

_log = logging.getLogger(__name__)

DTYPES: Final = (torch.bfloat16, torch.float16)
_NARROW_ROWS = 32  # a tile of fewer rows reads the weight too often, if there are more rows
_BUSY = 0.9  # of the processors, that a large tile must occupy
_ROW_TILES_TOGETHER = 8
_TRIAL_INPUTS, _TRIAL_OUTPUTS, _TRIAL_ROWS = 2048, 256, 300


@dataclass(frozen=True, slots=True)
class LinearTile:
    """What one program computes: ``outputs`` of ``rows``, ``inputs`` at a time, with ``stages - 1`` loads ahead."""

    outputs: int
    rows: int
    inputs: int
    warps: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.outputs + self.rows) * self.inputs * 2


TILES: Final = (
    LinearTile(128, 256, 64, 8, 4),
    LinearTile(128, 128, 64, 8, 4),
    LinearTile(128, 64, 64, 4, 4),
    LinearTile(64, 64, 64, 4, 6),
    LinearTile(64, 32, 128, 4, 4),
    LinearTile(64, 16, 128, 4, 5),
)
"""From the largest to the smallest."""


class TritonLinear:
    """``x @ weight.T + bias + residual`` in bfloat16 or float16 with float32 sums, rounded once."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """``weight``: [out_features, in_features]; ``bias``: [out_features].

        Raises: ValueError for other types and for CPUs; ImportError without Triton.
        """
        if weight.dtype not in DTYPES:
            raise ValueError(f"Triton's linear layer takes bfloat16 or float16: {weight.dtype}")
        if weight.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("Triton's linear layer runs on CUDA, not on the CPU")
        self._weight = weight.contiguous()
        self._bias = bias
        self._gpu = gpu_of(weight.device)
        self._tiles = agreeing_tiles(weight.device, weight.dtype)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        tile = tile_for(len(x), len(self._weight), self._tiles, self._gpu)
        return run(tile, x, self._weight, self._bias, residual)


def fitting_tiles(gpu: Gpu) -> tuple[LinearTile, ...]:
    """The tiles, with fewer loads ahead where the GPU has little shared memory; without those that still do not fit."""
    found = []
    for tile in TILES:
        stages = min(tile.stages, gpu.shared_bytes // replace(tile, stages=1).shared_bytes)
        if stages >= 2:
            found.append(replace(tile, stages=stages))
    return tuple(found)


@cache
def tile_for(num_rows: int, num_outputs: int, tiles: Sequence[LinearTile], gpu: Gpu) -> LinearTile:
    """The largest tile with programs for nearly all processors; if there is none, the smallest that reads the weight
    once, or in ``_NARROW_ROWS`` rows at a time."""
    rows = max(min(tile.rows for tile in tiles), 1 << (num_rows - 1).bit_length())
    fitting = [tile for tile in tiles if min(rows, _NARROW_ROWS) <= tile.rows <= rows] or [tiles[-1]]
    for tile in fitting:
        if math.ceil(num_outputs / tile.outputs) * math.ceil(num_rows / tile.rows) >= _BUSY * gpu.processors:
            return tile
    return fitting[-1]


def run(tile: LinearTile, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """[R, in_features] -> [R, out_features], in programs of that tile."""
    num_rows, in_features = x.shape
    out_features = len(weight)
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
    num_programs = math.ceil(out_features / tile.outputs) * math.ceil(num_rows / tile.rows)
    importlib.import_module("workers.kernels.triton.linear_kernel").linear[(num_programs,)](
        x,
        weight,
        bias,
        residual,
        out,
        num_rows,
        in_features,
        out_features,
        x.stride(0),
        weight.stride(0),
        out_features if residual is None else residual.stride(0),
        out.stride(0),
        tile_out=tile.outputs,
        tile_rows=tile.rows,
        tile_in=tile.inputs,
        fills_tiles=in_features % tile.inputs == 0,
        row_tiles_together=_ROW_TILES_TOGETHER,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )
    return out


@cache
def agreeing_tiles(device: torch.device, dtype: torch.dtype) -> tuple[LinearTile, ...]:
    """The fitting tiles with the bits of the smallest one, found by running all of them; once for a device and type.

    It also compiles them, which would otherwise stop the first requests. The trial's exact sums are all zero, because
    each product has its negative half a row later. So a result is the rounding error of its sum, which another order of
    summing changes.
    """
    tiles = fitting_tiles(gpu_of(device))
    if device.type != "cuda":
        return tiles
    generator = torch.Generator().manual_seed(0)

    def spread(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) * torch.randint(-8, 9, size, generator=generator).exp2()

    half, rows = spread(_TRIAL_OUTPUTS, _TRIAL_INPUTS // 2), spread(_TRIAL_ROWS, _TRIAL_INPUTS // 2)
    weight = torch.cat((half, -half), 1).to(device, dtype)
    x = torch.cat((rows, rows), 1).to(device, dtype)
    nothing = torch.zeros((_TRIAL_ROWS, _TRIAL_OUTPUTS), dtype=dtype, device=device)
    wanted = run(tiles[-1], x, weight, None, None)
    agreeing = tuple(
        tile
        for tile in tiles
        if torch.equal(run(tile, x, weight, None, None), wanted)
        and torch.equal(run(tile, x, weight, None, nothing), wanted)
    )
    _log.info("linear layers by Triton in tiles of %s", [f"{tile.outputs}x{tile.rows}" for tile in agreeing])
    if len(agreeing) < len(tiles):
        _log.warning("this GPU computes other bits in %d tiles of Triton's linear layer", len(tiles) - len(agreeing))
    return agreeing

"""Finds the tile sizes in which a decoder's rows keep their bits on this machine."""

import torch

from workers.kernels.linear import LinearShape, cancelling_linear, linear_shapes
from workers.kernels.tiles import RowTiles, probe
from workers.models.decoder import Decoder
from workers.models.random_rows import RowProbe

# One row is for machines on which no other size agrees. Two rows take longer than four (oneDNN on Zen 4).
_LAYER_TILES = (1, *range(4, 32, 4), *range(32, 64, 8), *range(64, 128, 32), *range(128, 513, 128))
_HEAD_TILES = (1, *range(4, 32, 4), *range(32, 65, 8))  # logits are wide, and few rows need them
_BASE_ROWS = {"cpu": 16, "cuda": 64}
_OVERHEAD_ROWS = {"cpu": 8, "cuda": 128}  # rows that take as long to compute as the weights to read


def probe_tiles(model: Decoder, device_type: str) -> tuple[RowTiles, RowTiles]:
    """The layers' and the head's tiles. Raises: ValueError if not even single rows give equal bits."""
    base, overhead = _BASE_ROWS[device_type], _OVERHEAD_ROWS[device_type]
    layer = _agreeing(model.row_functions(), _LAYER_TILES, base)
    head = _agreeing([model.head_function()], _HEAD_TILES, base)
    return RowTiles(layer, overhead), RowTiles(head, overhead)


def _agreeing(row_probes: list[RowProbe], candidates: tuple[int, ...], base: int) -> tuple[int, ...]:
    """The sizes that agree for all functions, and for each of their linear layers with sums that cancel.

    In float32 the functions' results show every difference. Rounded to fewer bits they hide nearly all differences in
    the order in which linear layers sum.
    """
    kept = candidates
    tried: set[LinearShape] = set()
    for function, make_inputs in row_probes:
        inputs = make_inputs(1)
        for shape in linear_shapes(function, *inputs):
            if shape not in tried and shape.dtype != torch.float32:
                tried.add(shape)
                kept = probe(*cancelling_linear(shape, inputs[0].device), kept, base)
        kept = probe(function, make_inputs, kept, base)
    return kept

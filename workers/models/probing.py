"""Finds out in tiles of which sizes a decoder's rows keep their bits, on this very machine."""

from workers.models.decoder import Decoder
from workers.tiles import RowTiles, probe

# One row is for machines where nothing else agrees; two take longer than four (oneDNN on Zen 4).
_LAYER_TILES = (1, *range(4, 32, 4), *range(32, 64, 8), *range(64, 128, 32), *range(128, 513, 128))
_HEAD_TILES = (1, *range(4, 32, 4), *range(32, 65, 8))  # logits are wide, and few rows want them
_BASE_ROWS = {"cpu": 16, "cuda": 64}
_OVERHEAD_ROWS = {"cpu": 8, "cuda": 128}  # rows whose computing takes as long as reading the weights


def probe_tiles(model: Decoder, device_type: str) -> tuple[RowTiles, RowTiles]:
    """The layers' and the head's tiles. Raises: ValueError, where not even single rows have equal bits."""
    base, overhead = _BASE_ROWS[device_type], _OVERHEAD_ROWS[device_type]
    kept: tuple[int, ...] = _LAYER_TILES
    for function, make_inputs in model.row_functions():
        kept = probe(function, make_inputs, kept, base)
    head = probe(*model.head_function(), _HEAD_TILES, base)
    return RowTiles(kept, overhead), RowTiles(head, overhead)

"""Says in the log which row tiles an engine found, because they decide how fast it computes prompts."""

import logging

from workers.kernels.tiles import AnyRows, RowTiles

_log = logging.getLogger(__name__)


def log_tiles(layers: RowTiles | AnyRows, head: RowTiles | AnyRows) -> None:
    """Log the tiles of the layers and of the output head, and warn if the layers' tiles make prefill slow."""
    _log.info("row tiles of the layers: %s; of the output head: %s", _sizes(layers), _sizes(head))
    if isinstance(layers, RowTiles) and layers.sizes[-1] < 2 * layers.overhead_rows:
        _log.warning(
            "on this device only row tiles of up to %d rows give equal bits, so a prefill reads all weights once for "
            "every %d tokens; reading them takes as long as computing %d tokens, so prefill is slow",
            layers.sizes[-1],
            layers.sizes[-1],
            layers.overhead_rows,
        )


def _sizes(tiles: RowTiles | AnyRows) -> str:
    return ", ".join(map(str, tiles.sizes)) or "none, because rows do not depend on the batch"

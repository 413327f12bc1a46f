"""The log says which row tiles an engine found, and what few tiles mean."""

import logging
from typing import Any

import pytest

from workers.engine_options import EngineOptions
from workers.engines.tile_log import log_tiles
from workers.engines.torch_engine import TorchEngine
from workers.kernels.tiles import AnyRows, RowTiles


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="workers")


def test_an_engine_logs_its_tiles(make_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The start's log names the sizes of the layers' and of the output head's tiles."""
    engine = TorchEngine(make_model().description, EngineOptions(dtype="float32", kv_cache_bytes=2**20))
    layers, head = (", ".join(map(str, tiles.sizes)) for tiles in (engine.layer_tiles, engine.head_tiles))
    assert layers
    assert f"row tiles of the layers: {layers}; of the output head: {head}" in caplog.messages


def test_no_tiles_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """Functions whose rows do not depend on the batch need no tiles, and the log gives that reason."""
    log_tiles(AnyRows(), AnyRows())
    (said,) = caplog.messages
    assert "because rows do not depend on the batch" in said


@pytest.mark.parametrize(("sizes", "is_warned"), [((1, 64), True), ((1, 64, 256), False)])
def test_small_tiles_are_warned_of(caplog: pytest.LogCaptureFixture, sizes: tuple[int, ...], is_warned: bool) -> None:
    """Tiles in which reading the weights takes much of the time cause a warning that names the largest tile."""
    log_tiles(RowTiles(sizes, overhead_rows=128), AnyRows())
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [f"{sizes[-1]} tokens" in warning for warning in warnings] == [True] * is_warned

"""What equal bits cost: decode steps with row tiles and without."""

from statistics import median

from tools.benchmarks.gpu.iterations import Measured
from tools.figures.figure import Column, Figure, FigureTable, Row
from workers.kernels.tiles import AnyRows

TITLE = "The price of equal bits: decode steps with row tiles and without"


def measure_bits(measured: Measured, batch: int, context: int, rounds: int) -> FigureTable | None:
    """Steps in turns: in tiles whose rows keep their bits, and with all rows in one call.

    None for an engine whose kernels give a row the same bits for any number of rows, because it needs no tiles.
    """
    engine = measured.engine
    tiles = engine.layer_tiles, engine.head_tiles
    if isinstance(engine.layer_tiles, AnyRows):
        return None
    plan = measured.decode(batch, context)
    tiled, untiled = [], []
    try:
        for _ in range(rounds):
            engine.layer_tiles, engine.head_tiles = tiles
            tiled += measured.device.seconds(lambda: measured.run(plan), 1)
            engine.layer_tiles, engine.head_tiles = AnyRows(), AnyRows()
            untiled += measured.device.seconds(lambda: measured.run(plan), 1)
    finally:
        engine.layer_tiles, engine.head_tiles = tiles
    cells = (
        Figure.of([1e3 * s for s in tiled]),
        Figure.of([1e3 * s for s in untiled]),
        Figure(median(tiled) / median(untiled)),
    )
    columns = (Column("with tiles", "ms", 2), Column("without", "ms", 2), Column("with / without", "x", 2))
    return FigureTable(TITLE, "requests", columns, (Row(f"{batch} with {context:,} tokens", cells),))

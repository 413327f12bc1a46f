"""What equal bits cost: decode steps with row tiles and without, or their products by our kernel and by torch's."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tools.benchmarks.gpu.device import Device
from tools.benchmarks.gpu.iterations import Measured
from tools.figures.figure import Column, Figure, FigureTable, Row
from workers.kernels.linear import PlainLinear, linear_class
from workers.kernels.tiles import AnyRows

PRODUCTS_TITLE = "The price of equal bits: a decode step's products by our kernel and by torch's"
_CACHED_BYTES = 2**28  # more than a device's caches hold
TITLE = "The price of equal bits: decode steps with row tiles and without"


def measure_bits(measured: Measured, batch: int, context: int, rounds: int) -> FigureTable:
    """Steps in turns: in tiles whose rows keep their bits, and with all rows in one call.

    An engine whose own kernel gives a row the same bits for any number of rows needs no tiles. Then its price is that
    kernel's time over torch's (``measure_products``).
    """
    engine = measured.engine
    tiles = engine.layer_tiles, engine.head_tiles
    plan = measured.decode(batch, context)
    if isinstance(engine.layer_tiles, AnyRows):
        kernel = linear_class(measured.device.torch, measured.mode.activations)
        with _counted(kernel) as counts:
            engine.logits(plan)
        return measure_products(measured.device, kernel, counts, batch, measured.mode.activations, rounds)
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


def measure_products(
    device: Device, kernel: Any, counts: Mapping[tuple[int, int], int], num_rows: int, dtype: torch.dtype, rounds: int
) -> FigureTable:
    """``num_rows`` rows through a linear layer of each shape, by ``kernel`` and by torch's ``F.linear`` in turns.

    ``counts``: how many layers of (outputs, inputs) a step has. Weights take turns, so that none is in a cache already.
    """
    rows: list[Row] = []
    totals: tuple[list[float], list[float]] = ([0.0] * rounds, [0.0] * rounds)
    for (num_outputs, num_inputs), count in sorted(counts.items()):
        x = torch.randn(num_rows, num_inputs, device=device.torch).to(dtype)
        num_weights = 1 + _CACHED_BYTES // (num_outputs * num_inputs * dtype.itemsize)
        weights = [
            torch.randn(num_outputs, num_inputs, device=device.torch).to(dtype) for _ in range(min(count, num_weights))
        ]
        seconds = []
        for each, total in zip((kernel, PlainLinear), totals, strict=True):
            layers = cycle([each(weight, None) for weight in weights])
            times = device.seconds(partial(_multiply, layers, x, count), rounds)
            seconds.append(times)
            total[:] = [one + other for one, other in zip(total, times, strict=True)]
        rows.append(_row(f"{count} of {num_outputs:,} x {num_inputs:,}", *seconds))
    columns = (Column("ours", "ms", 2), Column("torch's", "ms", 2), Column("ours / torch's", "x", 2))
    return FigureTable(PRODUCTS_TITLE, f"layers, {num_rows} rows", columns, (*rows, _row("all of a step", *totals)))


def _multiply(layers: Iterator[Any], x: Tensor, count: int) -> None:
    for _ in range(count):
        next(layers)(x)


def _row(name: str, ours: list[float], torchs: list[float]) -> Row:
    cells = (
        Figure.of([1e3 * s for s in ours]),
        Figure.of([1e3 * s for s in torchs]),
        Figure(median(ours) / median(torchs)),
    )
    return Row(name, cells)


@contextmanager
def _counted(kernel: Any) -> Iterator[Counter[tuple[int, int]]]:
    """Count the linear layers that run meanwhile, by (outputs, inputs)."""
    counts: Counter[tuple[int, int]] = Counter()
    own = kernel.__call__

    def counting(layer: Any, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y: Tensor = own(layer, x, residual)
        counts[y.shape[-1], x.shape[-1]] += 1
        return y

    kernel.__call__ = counting
    try:
        yield counts
    finally:
        kernel.__call__ = own

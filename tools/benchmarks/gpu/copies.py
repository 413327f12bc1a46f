"""Copies of KV between the device and the host: their rate, and what they cost decode steps beside them."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median

from actorserve.core.messages import StepPlan
from tools.benchmarks.gpu.iterations import Measured
from tools.figures.figure import Column, Figure, FigureTable, Row

RATE_TITLE = "Swapping KV, compared with one plain copy of as many bytes"
BESIDE_TITLE = "Decode steps while KV is swapped"
_STEPS = 5  # in a turn


def measure_swaps(measured: Measured, rounds: int) -> FigureTable:
    """Copies of all blocks that the host's pool holds, out and in."""
    engine = measured.engine
    blocks = tuple(range(min(engine.num_host_blocks, engine.num_blocks)))
    num_bytes = len(blocks) * engine.bytes_per_block
    rows = []
    for name, out in (("to the host", True), ("to the device", False)):
        copy = engine.copy_out if out else engine.copy_in
        seconds = measured.device.seconds(partial(copy, blocks, blocks), rounds)
        swap = Figure.of([num_bytes / s / 1e9 for s in seconds])
        plain = measured.device.host_bytes_per_s(num_bytes, rounds, out=out)
        ours = Figure(swap.median / (plain.median / 1e9))
        rows.append(Row(name, (swap, Figure(plain.median / 1e9, rounds=rounds), ours)))
    columns = (Column("swap", "GB/s", 1), Column("plain copy", "GB/s", 1), Column("swap / plain copy", "x", 2))
    return FigureTable(RATE_TITLE, "KV", columns, tuple(rows))


def measure_beside(measured: Measured, batch: int, context: int, rounds: int) -> FigureTable:
    """Steps alone and beside copies, in turns. The copies take the pool's last blocks."""
    engine = measured.engine
    count = min(engine.num_host_blocks, engine.num_blocks)
    here, there = tuple(range(engine.num_blocks - count, engine.num_blocks)), tuple(range(count))
    plan = measured.decode(batch, context)
    stop = threading.Event()

    def copy() -> None:
        while not stop.is_set():
            engine.copy_out(here, there)
            engine.copy_in(there, here)

    alone, beside = [], []
    with ThreadPoolExecutor(1) as threads:
        for _ in range(rounds):
            alone += _step_times(measured, plan)
            stop.clear()
            copying = threads.submit(copy)
            try:
                beside += _step_times(measured, plan)
            finally:
                stop.set()
            copying.result()
    cells = (
        Figure.of([1e3 * s for s in alone]),
        Figure.of([1e3 * s for s in beside]),
        Figure(median(beside) / median(alone)),
    )
    columns = (Column("alone", "ms", 2), Column("beside copies", "ms", 2), Column("beside / alone", "x", 3))
    return FigureTable(BESIDE_TITLE, "requests", columns, (Row(f"{batch} with {context:,} tokens", cells),))


def _step_times(measured: Measured, plan: StepPlan) -> list[float]:
    """Seconds until a step's tokens are on the host. Waiting for the device would wait for the copies, too."""
    times = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        measured.run(plan)
        times.append(time.perf_counter() - began)
    return times[1:]  # the first one begins before the copies

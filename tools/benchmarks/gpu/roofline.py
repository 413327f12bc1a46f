"""Decode and prefill, as shares of what the device's memory and its matrix units allow."""

from collections.abc import Sequence
from functools import partial
from statistics import median

from tools.benchmarks.gpu.costs import decode_bytes, prefill_flops
from tools.benchmarks.gpu.iterations import Measured
from tools.figures.figure import Column, Figure, FigureTable, Row

DECODE_TITLE = "Time of a decode step, and its share of the roofline"
PREFILL_TITLE = "Time of a prefill, and its share of the matrix rate"
_STEPS = 8  # of a decode, in a run, so that what only the first or the last step waits for counts little


def measure_decodes(
    measured: Measured, batches: Sequence[int], contexts: Sequence[int], copy_bytes_per_s: Figure, rounds: int
) -> FigureTable:
    """Each batch with each context that the model has.

    The share is the time that a plain copy takes for the bytes that the step must read, over the step's time.
    """
    rows = []
    for context in filter(measured.fits, contexts):
        for batch in batches:
            plan = measured.decode(batch, context)
            times = measured.device.seconds(partial(measured.run, plan, _STEPS), rounds)
            seconds = [s / _STEPS for s in times]
            num_bytes = decode_bytes(measured.description, measured.mode, batch, context)
            shared = ", in shared KV" if measured.shares_blocks(batch, context) else ""
            rows.append(
                Row(
                    f"{batch} with {context:,} tokens{shared}",
                    (
                        Figure.of([1e3 * s for s in seconds]),
                        Figure(batch / median(seconds)),
                        Figure(num_bytes / 2**30),
                        Figure(num_bytes / copy_bytes_per_s.median / median(seconds)),
                    ),
                )
            )
    columns = (
        Column("step", "ms", 2),
        Column("output", "tokens/s", 0),
        Column("read", "GiB", 2),
        Column("share of the roofline", "", 2),
    )
    return FigureTable(DECODE_TITLE, "requests", columns, tuple(rows))


def measure_prefills(measured: Measured, prompts: Sequence[int], flops_per_s: Figure, rounds: int) -> FigureTable:
    """Each prompt in one iteration. The share is its multiplications over the rate of one large product."""
    rows = []
    for num_tokens in filter(measured.fits, prompts):
        plan = measured.prefill(num_tokens)
        seconds = measured.device.seconds(partial(measured.run, plan), rounds)
        rate = prefill_flops(measured.description, num_tokens) / median(seconds)
        rows.append(
            Row(
                f"{num_tokens:,}",
                (
                    Figure.of([1e3 * s for s in seconds]),
                    Figure(num_tokens / median(seconds)),
                    Figure(rate / 1e12),
                    Figure(rate / flops_per_s.median),
                ),
            )
        )
    columns = (
        Column("prefill", "ms", 1),
        Column("prompt", "tokens/s", 0),
        Column("products", "TFLOP/s"),
        Column("share of the matrix rate", "", 2),
    )
    return FigureTable(PREFILL_TITLE, "tokens", columns, tuple(rows))

"""How long the device idles in a decode step."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median

from torch.profiler import ProfilerActivity, profile

from tools.benchmarks.gpu.iterations import Measured
from tools.figures.figure import Column, Figure, FigureTable, Row

TITLE = "How long the device idles in a decode step"


def measure_gaps(measured: Measured, batches: Sequence[int], context: int, rounds: int) -> FigureTable:
    """Steps without a scheduler between them, each begun before the one before it has ended.

    The device's busy time comes from a profiled run, and the step's time from a run without the profiler, which slows
    the host down. On a CPU the operators' time counts as busy.
    """
    rows = []
    for batch in batches:
        plan = measured.decode(batch, context)
        steps = partial(measured.run, plan, rounds)
        step_s = median(measured.device.seconds(steps, 3)) / rounds
        busy_s = _busy_s(measured, steps) / rounds
        idle_s = max(0.0, step_s - busy_s)
        rows.append(
            Row(
                f"{batch} with {context:,} tokens",
                (
                    Figure(1e3 * step_s, rounds=3 * rounds),
                    Figure(1e3 * busy_s, rounds=rounds),
                    Figure(1e3 * idle_s),
                    Figure(100 * idle_s / step_s),
                ),
            )
        )
    columns = (Column("step", "ms", 3), Column("busy", "ms", 3), Column("idle", "ms", 3), Column("idle", "%", 1))
    return FigureTable(TITLE, "requests", columns, tuple(rows))


def _busy_s(measured: Measured, steps: Callable[[], None]) -> float:
    """How long the device works on ``steps``."""
    is_cuda = measured.device.torch.type == "cuda"
    wanted = "CUDA" if is_cuda else "CPU"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as found:
        steps()
        measured.device.wait()
    ranges = (
        (event.time_range.start, event.time_range.end) for event in found.events() if event.device_type.name == wanted
    )
    return covered(ranges) / 1e6  # from microseconds


def covered(ranges: Iterable[tuple[float, float]]) -> float:
    """The length of the union of ranges (start, end)."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(ranges):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total

"""Downtime by context length, a line for each way to move a request, as PNG."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.migration.move_times import MAX_STEPS, MoveSummary

_LABELS = {"live": "Live migration", "blocking": "Blocking copy", "recompute": "Recompute"}
_METADATA = {"Software": None}  # otherwise the file holds the version of matplotlib


def write_plot(summaries: Sequence[MoveSummary], file: Path) -> None:
    """Raises: BenchError."""
    figure, (in_steps, in_ms) = plt.subplots(1, 2, figsize=(12, 4.5))
    for way in dict.fromkeys(summary.way for summary in summaries):
        chosen = sorted(
            (summary for summary in summaries if summary.way == way), key=lambda summary: summary.context_tokens
        )
        lengths = [summary.context_tokens for summary in chosen]
        label = _LABELS.get(way, way)
        in_steps.plot(
            lengths, [summary.downtime_steps.median for summary in chosen], marker="o", markersize=4, label=label
        )
        in_ms.plot(lengths, [summary.downtime_ms.median for summary in chosen], marker="o", markersize=4, label=label)
    in_steps.axhline(MAX_STEPS, color="grey", linestyle="--", linewidth=1, label=f"goal: {MAX_STEPS:g} steps")
    ticks = sorted({summary.context_tokens for summary in summaries})
    for axis, label in ((in_steps, "Downtime, decode steps"), (in_ms, "Downtime, ms")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{length:,}" for length in ticks])
        axis.set_yscale("log")
        axis.set_xlabel("Context length, tokens")
        axis.set_ylabel(label)
        axis.legend(fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(file, dpi=110, metadata=_METADATA)
    except (OSError, ValueError) as error:  # a missing folder; a suffix that is no picture format
        reason = error.strerror if isinstance(error, OSError) else error
        raise BenchError(f"cannot write {file}: {reason}") from None
    finally:
        plt.close(figure)

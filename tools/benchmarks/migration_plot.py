"""Downtime by context, a line for each way, as PNG."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from tools.benchmarks.errors import BenchError
from tools.benchmarks.migration_figures import MAX_STEPS, Figures

_METADATA = {"Software": None}  # else the version of matplotlib stands in the file


def write_plot(figures: Sequence[Figures], file: Path) -> None:
    """Raises: BenchError."""
    figure, (in_steps, in_ms) = plt.subplots(1, 2, figsize=(12, 4.5))
    for way in dict.fromkeys(each.way for each in figures):
        chosen = sorted((each for each in figures if each.way == way), key=lambda each: each.context_tokens)
        lengths = [each.context_tokens for each in chosen]
        in_steps.plot(lengths, [each.downtime_steps for each in chosen], marker="o", markersize=4, label=way)
        in_ms.plot(lengths, [each.downtime_s * 1e3 for each in chosen], marker="o", markersize=4, label=way)
    in_steps.axhline(MAX_STEPS, color="grey", linestyle="--", linewidth=1)
    for axis, label in ((in_steps, "downtime, decode steps"), (in_ms, "downtime, ms")):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("context, tokens")
        axis.set_ylabel(label)
        axis.legend(fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(file, dpi=110, metadata=_METADATA)
    except (OSError, ValueError) as error:  # a folder that is not there; a name that ends like no picture
        reason = error.strerror if isinstance(error, OSError) else error
        raise BenchError(f"cannot write {file}: {reason}") from None
    finally:
        plt.close(figure)

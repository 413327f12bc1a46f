"""An experiment's plots, as PNG files: latency by rate, or by the variants' x, a line for each arm."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_METRICS = (("per_token_s", "mean", "mean s/token"), ("per_token_s", "p95", "P95 s/token"))
_METADATA = {"Software": None}  # else the version of matplotlib stands in the file


def write_plots(values: dict[str, Any], folder: Path) -> list[Path]:
    """Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = values["cases"]
    files = []
    if all(case["x"] is not None for case in cases):
        files.append(_plot(folder / f"{values['name']}.png", values, cases, by_x=True))
        return files
    for variant in dict.fromkeys(case["variant"] for case in cases):
        name = "-".join(part for part in (values["name"], variant) if part)
        chosen = [case for case in cases if case["variant"] == variant]
        if any(len(case["runs"]) > 1 for case in chosen):
            files.append(_plot(folder / f"{name}.png", values, chosen, by_x=False))
        else:
            files.append(_bars(folder / f"{name}.png", chosen))
    return files


def _plot(file: Path, values: dict[str, Any], cases: list[dict[str, Any]], by_x: bool) -> Path:
    limits = {}
    for goal in values["config"].get("search", {}).get("goals", ()):
        limits[goal["metric"]] = goal["limit"]
    _, axes = plt.subplots(1, len(_METRICS), figsize=(6 * len(_METRICS), 4.5))
    for axis, (latency, figure_name, label) in zip(axes, _METRICS, strict=True):
        for arm in dict.fromkeys(case["arm"] for case in cases):
            points = sorted(
                (case["x"] if by_x else run["rate_per_s"], run["latency"][latency][figure_name])
                for case in cases
                if case["arm"] == arm
                for run in case["runs"]
                if run["latency"][latency] is not None
            )
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=arm or None)
        limit = limits.get(f"{latency}.{figure_name}")
        if limit is not None:
            axis.axhline(limit, color="grey", linestyle="--", linewidth=1)
            axis.set_ylim(0, 3 * limit)
        if by_x:
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
        axis.set_xlabel(values["config"].get("title") or "variant" if by_x else "requests/s")
        axis.set_ylabel(label)
        _legend(axis)
    return _save(file)


def _bars(file: Path, cases: list[dict[str, Any]]) -> Path:
    _, axes = plt.subplots(1, 4, figsize=(14, 3.5))
    for axis, latency in zip(axes, ("ttft_s", "tpot_s", "e2e_s", "per_token_s"), strict=True):
        for place, case in enumerate(cases):
            summary = case["runs"][0]["latency"][latency]
            if summary is not None:
                names = ("mean", "p50", "p90", "p95", "p99")
                width = 0.8 / len(cases)
                positions = [x + place * width for x in range(len(names))]
                axis.bar(positions, [summary[name] for name in names], width, label=case["arm"] or None)
                axis.set_xticks(range(len(names)), names)
        axis.set_title(latency)
        _legend(axis)
    return _save(file)


def _legend(axis: Axes) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def _save(file: Path) -> Path:
    plt.tight_layout()
    plt.savefig(file, dpi=110, metadata=_METADATA)
    plt.close()
    return file

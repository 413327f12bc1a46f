"""An experiment's plots, as PNG files: figures by rate, by the variants' x, or by another figure, a line for each arm;
where there is nothing to put on an axis, bars.
"""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from tools.simulation.figures import figure_of

_LABELS = {"latency.per_token_s.mean": "mean s/token", "latency.per_token_s.p95": "P95 s/token"}  # and what is plotted
_COLUMNS = 4
_MAX_RATIO = 30.0  # of the bars on an even scale
_METADATA = {"Software": None}  # else the version of matplotlib stands in the file


def write_plots(values: dict[str, Any], folder: Path) -> list[Path]:
    """Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = values["cases"]
    figures = values["config"].get("figures", [])
    are_single = all(len(case["runs"]) == 1 and case["x"] is None for case in cases)
    if figures and values["config"].get("plot_by") is None and are_single:
        return [_bars_of(folder / f"{values['name']}.png", cases, figures)]
    files = []
    if "plot_by" in values["config"]:
        files.append(_plot(folder / f"{values['name']}.png", values, cases, values["config"]["plot_by"]))
        return files
    if all(case["x"] is not None for case in cases):
        files.append(_plot(folder / f"{values['name']}.png", values, cases, "x"))
        return files
    for variant in dict.fromkeys(case["variant"] for case in cases):
        name = "-".join(part for part in (values["name"], variant) if part)
        chosen = [case for case in cases if case["variant"] == variant]
        if any(len(case["runs"]) > 1 for case in chosen):
            files.append(_plot(folder / f"{name}.png", values, chosen, "rate_per_s"))
        else:
            files.append(_bars(folder / f"{name}.png", chosen))
    return files


def _plot(file: Path, values: dict[str, Any], cases: list[dict[str, Any]], by: str) -> Path:
    """``by``: what is on the x axis; "x", that of the variants, or a figure of the runs."""
    config = values["config"]
    limits = {f"latency.{goal['metric']}": goal["limit"] for goal in config.get("search", {}).get("goals", ())}
    names = config.get("figures") or list(_LABELS)
    for axis, name in zip(_axes(len(names)), names, strict=True):
        for arm in dict.fromkeys(case["arm"] for case in cases):
            points = sorted(
                (x, y)
                for case in cases
                if case["arm"] == arm
                for run in case["runs"]
                if (x := case["x"] if by == "x" else figure_of(run, by)) is not None
                and (y := figure_of(run, name)) is not None
            )
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=arm or None)
        limit = limits.get(name)
        if limit is not None:
            axis.axhline(limit, color="grey", linestyle="--", linewidth=1)
            axis.set_ylim(0, 3 * limit)
        if by == "x":
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
        axis.set_xlabel({"x": config.get("title") or "variant", "rate_per_s": "requests/s"}.get(by, by))
        axis.set_ylabel(_LABELS.get(name, name))
        _legend(axis)
    return _save(file)


def _bars_of(file: Path, cases: list[dict[str, Any]], names: list[str]) -> Path:
    """Figures by variant, a bar for each arm."""
    variants = list(dict.fromkeys(case["variant"] for case in cases))
    arms = list(dict.fromkeys(case["arm"] for case in cases))
    width = 0.8 / len(arms)
    axes = _axes(len(names))
    for axis, name in zip(axes, names, strict=True):
        every: list[float] = []
        for place, arm in enumerate(arms):
            heights = [
                figure_of(case["runs"][0], name) or 0.0
                for variant in variants
                for case in cases
                if (case["variant"], case["arm"]) == (variant, arm)
            ]
            every += heights
            axis.bar([x + place * width for x in range(len(variants))], heights, width, label=arm or None)
        axis.set_xticks([x + 0.4 - width / 2 for x in range(len(variants))], variants)
        axis.set_title(name, fontsize=10)
        shown = [height for height in every if height > 0.0]
        if shown and max(shown) > _MAX_RATIO * min(shown):
            axis.set_yscale("log")
    _legend(axes[0])
    return _save(file)


def _axes(number: int) -> list[Axes]:
    num_columns = min(number, _COLUMNS)
    num_rows = -(-number // num_columns)
    width = 6 if number == 2 else 4.5
    _, axes = plt.subplots(num_rows, num_columns, figsize=(width * num_columns, 4.5 * num_rows), squeeze=False)
    every = [axis for row in axes for axis in row]
    for axis in every[number:]:
        axis.set_visible(False)
    return every[:number]


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

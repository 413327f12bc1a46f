"""An experiment's plots, as PNG files: figures by rate, by the variants' x, or by another figure, a line for each arm.

If there is nothing to put on an axis, figures are bars. With several seeds, all of them are medians.
"""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from tools.simulation.arms import medians_over_seeds
from tools.simulation.figures import label_of, labels_of, scaled_figure

DEFAULT_FIGURES = ("latency.per_token_s.mean", "latency.per_token_s.p95")
_LATENCIES = ("ttft_s", "tpot_s", "e2e_s", "per_token_s")
_STATISTICS = ("mean", "p50", "p90", "p95", "p99")
_COLUMNS = 4
_MAX_RATIO = 30.0  # of the highest bar to the lowest on a linear scale
OCCUPANCY = "occupancy"
"""What ``plot_by`` names to have the tokens of iterations plotted over time."""

_METADATA = {"Software": None}  # otherwise the file holds the version of matplotlib


def write_plots(values: dict[str, Any], folder: Path) -> list[Path]:
    """Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    cases, config = medians_over_seeds(values["cases"]), values["config"]
    figures = config.get("figures", [])
    whole = folder / f"{values['name']}.png"
    are_single = all(len(case["runs"]) == 1 and case["x"] is None for case in cases)
    if figures and config.get("plot_by") is None and are_single:
        return [_bars_of(whole, config, cases, figures)]
    if config.get("plot_by") == OCCUPANCY:
        return [_occupancy(whole, config, cases)]
    if "plot_by" in config:
        return [_plot(whole, config, cases, config["plot_by"])]
    if all(case["x"] is not None for case in cases):
        return [_plot(whole, config, cases, "x")]
    files = []
    for variant in dict.fromkeys(case["variant"] for case in cases):
        file = folder / f"{'-'.join(part for part in (values['name'], variant) if part)}.png"
        chosen = [case for case in cases if case["variant"] == variant]
        if any(len(case["runs"]) > 1 for case in chosen):
            files.append(_plot(file, config, chosen, "rate_per_s"))
        else:
            files.append(_bars(file, config, chosen))
    return files


def _plot(file: Path, config: dict[str, Any], cases: list[dict[str, Any]], by: str) -> Path:
    """``by`` is what the x axis shows: "x", that of the variants, or a figure of the runs."""
    limits = {f"latency.{goal['metric']}": goal.get("limit") for goal in config.get("search", {}).get("goals", ())}
    names = config.get("figures") or DEFAULT_FIGURES
    words, arm_labels = config.get("labels"), labels_of(config.get("arms", ()))
    for axis, name in zip(_axes(len(names)), names, strict=True):
        for arm in dict.fromkeys(case["arm"] for case in cases):
            points = sorted(
                (x, y)
                for case in cases
                if case["arm"] == arm
                for run in case["runs"]
                if (x := case["x"] if by == "x" else scaled_figure(run, by)) is not None
                and (y := scaled_figure(run, name)) is not None
            )
            label = arm_labels[arm] or None
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=label)
        limit = limits.get(name)
        if limit is not None:
            limit *= label_of(name).scale
            axis.axhline(limit, color="grey", linestyle="--", linewidth=1)
            axis.set_ylim(0, 3 * limit)
        if by == "x":
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
        axis.set_xlabel(config.get("title") or "variant" if by == "x" else label_of(by, words).with_unit)
        axis.set_ylabel(label_of(name, words).with_unit)
        _legend(axis)
    return _save(file)


def _bars_of(file: Path, config: dict[str, Any], cases: list[dict[str, Any]], names: list[str]) -> Path:
    """Figures by variant, a bar for each arm."""
    variants = list(dict.fromkeys(case["variant"] for case in cases))
    arms = list(dict.fromkeys(case["arm"] for case in cases))
    words, arm_labels = config.get("labels"), labels_of(config.get("arms", ()))
    variant_labels = labels_of(config.get("variants", ()))
    width = 0.8 / len(arms)
    axes = _axes(len(names))
    for axis, name in zip(axes, names, strict=True):
        all_heights: list[float] = []
        for place, arm in enumerate(arms):
            heights = [
                scaled_figure(case["runs"][0], name) or 0.0
                for variant in variants
                for case in cases
                if (case["variant"], case["arm"]) == (variant, arm)
            ]
            all_heights += heights
            positions = [x + place * width for x in range(len(variants))]
            axis.bar(positions, heights, width, label=arm_labels[arm] or None)
        ticks = [variant_labels[variant].replace(", ", "\n") for variant in variants]
        axis.set_xticks([x + 0.4 - width / 2 for x in range(len(variants))], ticks, fontsize=8)
        axis.set_title(label_of(name, words).with_unit, fontsize=10)
        shown = [height for height in all_heights if height > 0.0]
        if shown and max(shown) > _MAX_RATIO * min(shown):
            axis.set_yscale("log")
    _legend(axes[0])
    return _save(file)


def _occupancy(file: Path, config: dict[str, Any], cases: list[dict[str, Any]]) -> Path:
    """The share of time in which a machine's iteration holds at most so many tokens: a line for each group of machines,
    and axes for each rate.
    """
    rates = sorted({run["rate_per_s"] for case in cases for run in case["runs"]}, key=lambda rate: rate or 0.0)
    arm_labels = labels_of(config.get("arms", ()))
    for axis, rate in zip(_axes(len(rates)), rates, strict=True):
        for case in cases:
            for run in case["runs"]:
                for group, found in run[OCCUPANCY].items() if run["rate_per_s"] == rate else ():
                    points = sorted((int(step), share) for step, share in found["at_most"].items())
                    label = ", ".join(filter(None, (arm_labels[case["arm"]], group)))
                    axis.step([step for step, _ in points], [share for _, share in points], where="post", label=label)
        axis.set_xscale("symlog", base=2, linthresh=1)
        axis.set_xlabel("tokens of the iteration; 0: there is none")
        axis.set_ylabel("share of time with at most so many")
        axis.set_ylim(0, 1.02)
        axis.set_title("" if rate is None else f"{rate:g} requests/s", fontsize=10)
        axis.legend(fontsize=8, loc="lower right")
    return _save(file)


def _axes(number: int) -> list[Axes]:
    num_columns = min(number, _COLUMNS)
    num_rows = -(-number // num_columns)
    width = 6 if number == 2 else 4.5
    _, axes = plt.subplots(num_rows, num_columns, figsize=(width * num_columns, 4.5 * num_rows), squeeze=False)
    all_axes = [axis for row in axes for axis in row]
    for axis in all_axes[number:]:
        axis.set_visible(False)
    return all_axes[:number]


def _bars(file: Path, config: dict[str, Any], cases: list[dict[str, Any]]) -> Path:
    """Latencies of one variant, a bar for each arm."""
    arm_labels = labels_of(config.get("arms", ()))
    _, axes = plt.subplots(1, len(_LATENCIES), figsize=(14, 3.5))
    for axis, latency in zip(axes, _LATENCIES, strict=True):
        for place, case in enumerate(cases):
            names = [f"latency.{latency}.{statistic}" for statistic in _STATISTICS]
            heights = [scaled_figure(case["runs"][0], name) for name in names]
            if None not in heights:
                width = 0.8 / len(cases)
                positions = [x + place * width for x in range(len(names))]
                axis.bar(positions, heights, width, label=arm_labels[case["arm"]] or None)
                axis.set_xticks(range(len(names)), [_statistic(name) for name in _STATISTICS])
        label = label_of(f"latency.{latency}.mean").with_unit
        axis.set_title(label.removeprefix("Mean ").capitalize(), fontsize=10)
        _legend(axis)
    return _save(file)


def _statistic(name: str) -> str:
    return "mean" if name == "mean" else name.upper()


def _legend(axis: Axes) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def _save(file: Path) -> Path:
    plt.tight_layout()
    plt.savefig(file, dpi=110, metadata=_METADATA)
    plt.close()
    return file

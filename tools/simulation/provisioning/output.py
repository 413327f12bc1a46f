"""What a search for sizes found: on the terminal, as JSON values, as a figure table, and as a plot."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.simulation.provisioning.plan import Provisioning
from tools.simulation.provisioning.running import Provisioned
from tools.simulation.provisioning.search import Size

_METADATA = {"Software": None}  # otherwise the file holds the version of matplotlib
_KW = 1e-3


def as_values(provisioning: Provisioning, found: Provisioned) -> dict[str, Any]:
    """Everything as JSON values. They depend on the configuration alone."""
    best = found.best(provisioning.table.least)
    return {
        "name": provisioning.name,
        "rate_per_s": provisioning.table.rate_per_s,
        "least": provisioning.table.least,
        "best": best and _size_values(best),
        "frontier": [_size_values(size) for size in found.frontier],
        "sizes": [_size_values(size) for size in found.sizes],
        "tried": [
            {
                "design": one.design,
                "counts": list(one.counts),
                "seed": one.seed,
                "held": one.is_held,
                "breaks": list(one.breaks),
            }
            for one in found.tried
        ],
    }


def _size_values(size: Size) -> dict[str, Any]:
    return {
        "design": size.design,
        "counts": list(size.counts),
        "cost_per_hour": size.cost_per_hour,
        "watts": size.watts,
    }


def show(provisioning: Provisioning, found: Provisioned, console: Console) -> None:
    """Show each design's cheapest size and its size of least power, the frontier, and the best size."""
    table = Table(
        "design",
        "machines",
        "cost/h",
        "kW",
        "",
        title=f"Clusters that hold {provisioning.table.rate_per_s:g} requests/s",
    )
    best = found.best(provisioning.table.least)
    for size in chosen_sizes(found):
        note = "best" if size == best else "frontier" if size in found.frontier else ""
        cost, power = f"{size.cost_per_hour:.2f}", f"{size.watts * _KW:.1f}"
        table.add_row(_titles(provisioning)[size.design], machines_of(provisioning, size), cost, power, note)
    for design in provisioning.designs:
        if not any(size.design == design.table.name for size in found.sizes):
            table.add_row(design.table.title, "none of these sizes", "", "", "")
    console.print(table)


def chosen_sizes(found: Provisioned) -> list[Size]:
    """The frontier, and of each design the cheapest size and the one of least power, by cost."""
    chosen = list(found.frontier)
    for name in dict.fromkeys(size.design for size in found.sizes):
        own = [size for size in found.sizes if size.design == name]
        chosen.append(min(own, key=lambda size: (size.cost_per_hour, size.watts)))
        chosen.append(min(own, key=lambda size: (size.watts, size.cost_per_hour)))
    return sorted(dict.fromkeys(chosen), key=lambda size: (size.cost_per_hour, size.watts, size.design))


def machines_of(provisioning: Provisioning, size: Size) -> str:
    """As "25 dgx-h100 prompt, 21 dgx-h100-capped token"."""
    (design,) = (design for design in provisioning.designs if design.table.name == size.design)
    parts = zip(size.counts, design.table.groups, strict=True)
    return ", ".join(" ".join(filter(None, (str(count), group.machine, group.role))) for count, group in parts)


def table_of(provisioning: Provisioning, found: Provisioned) -> FigureTable:
    columns = (Column("cost", "$/h", 2), Column("power", "kW", 1))
    rows = [
        Row(
            f"{_titles(provisioning)[size.design]}: {machines_of(provisioning, size)}"
            + (" (frontier)" if size in found.frontier else ""),
            (Figure(size.cost_per_hour), Figure(size.watts * _KW)),
        )
        for size in chosen_sizes(found)
    ]
    title = f"Clusters that hold the service levels at {provisioning.table.rate_per_s:g} requests/s"
    return FigureTable(title, "cluster", columns, tuple(rows))


def write_plot(provisioning: Provisioning, found: Provisioned, folder: Path) -> Path:
    """Each design's sizes by cost and power, and the frontier. Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    _, axis = plt.subplots(figsize=(7, 4.5))
    for design in provisioning.designs:
        own = sorted((size.cost_per_hour, size.watts * _KW) for size in found.sizes if size.design == design.table.name)
        if own:
            axis.plot(*zip(*own, strict=True), marker="o", markersize=3, linewidth=0.8, label=design.table.title)
    best = [(size.cost_per_hour, size.watts * _KW) for size in found.frontier]
    if best:
        axis.step(*zip(*best, strict=True), where="post", color="black", linewidth=1.5, label="frontier")
        axis.legend(fontsize=8)
    axis.set_xlabel("cost, $/h")
    axis.set_ylabel("provisioned power of GPUs, kW")
    plt.tight_layout()
    file = folder / f"{provisioning.name}.png"
    plt.savefig(file, dpi=110, metadata=_METADATA)
    plt.close()
    return file


def _titles(provisioning: Provisioning) -> dict[str, str]:
    return {design.table.name: design.table.title for design in provisioning.designs}

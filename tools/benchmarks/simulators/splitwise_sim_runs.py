"""``tools/bench splitwise-sim-runs``: our simulator, with SplitwiseSim's rules, beside runs of SplitwiseSim on file.

SplitwiseSim is not needed. Its requests are not on file, so ours are other ones, drawn in the same way. With
``--again`` SplitwiseSim itself gets the same requests as ours, and with ``--running-counts`` also one rule of ours.
"""

import argparse
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pydantic import Field
from rich.console import Console

from actorserve.sim.tables import Table, parse_table
from actorserve.sim.workload.traces import TraceRow, read_trace
from tools.benchmarks.common.arguments import count
from tools.benchmarks.common.console import print_figures, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.common.paths import ROOT
from tools.benchmarks.simulators import their_run
from tools.benchmarks.simulators.latencies import NAMES, PERCENTILES, SimulatedRun
from tools.benchmarks.simulators.requests_file import draw
from tools.benchmarks.simulators.splitwise_sim import THEIRS, simulate_all
from tools.benchmarks.simulators.splitwise_sim_build import ADVICE, find_build
from tools.benchmarks.simulators.their_run import Machines
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.simulation.experiment import read_experiment

EXPERIMENT: Final = ROOT / "config" / "simulations" / "splitwise-sim-designs.toml"
RUNS: Final = Path(__file__).with_suffix(".toml")
_SECONDS: Final = 120.0  # of arrivals, as in the runs on file
_MIN_WIDTH: Final = 160  # columns of the tables: a narrow terminal wraps them
_NAMES: Final = tuple(f"{name} P{percent}" for name in NAMES for percent in PERCENTILES)

MACHINES: Final[Mapping[str, Machines]] = MappingProxyType(
    {
        "baseline-a100": Machines(num_a100=70),
        "baseline-h100": Machines(num_h100=40),
        "aa": Machines(num_a100=70, num_prompt=45),
        "hh": Machines(num_h100=40, num_prompt=25),
        "ha": Machines(num_a100=26, num_h100=25, num_prompt=25),
        "hhcap": Machines(num_h100=25, num_capped=21, num_prompt=25),
    }
)


class RunTable(Table):
    """Runs of several designs at one rate: of each design its latencies, in seconds."""

    rate_per_s: float = Field(gt=0)
    latencies: dict[str, tuple[float, ...]]


class RunsFile(Table):
    columns: tuple[str, ...] = Field(strict=False)
    runs: dict[str, RunTable]


def read_runs(file: Path = RUNS) -> RunsFile:
    """Raises: SimulationError for another file than the one that is shipped."""
    values = tomllib.loads(file.read_text(encoding="utf-8"))
    runs: dict[str, Any] = {}
    for name, table in values["runs"].items():
        latencies = {design: tuple(times) for design, times in table.items() if design != "rate_per_s"}
        runs[name] = {"rate_per_s": table["rate_per_s"], "latencies": latencies}
    return parse_table(RunsFile, {"columns": values["columns"], "runs": runs}, str(file))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runs = read_runs().runs
    designs = [arm["name"] for arm in read_experiment(EXPERIMENT, {}).plan.arms]
    parser.add_argument("trace", type=Path, metavar="CSV", help="lengths are drawn from it; Azure's format")
    parser.add_argument("--load", choices=runs, required=True, help="workload and requests/s of the runs on file")
    parser.add_argument("--designs", nargs="+", choices=designs, default=designs, help="the clusters (all)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (%(default)s)")
    parser.add_argument(
        "--processes",
        type=count,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="how many of ours run at once (%(default)s)",
    )
    parser.add_argument("--again", action="store_true", help="run SplitwiseSim, too; without it, its runs on file")
    parser.add_argument(
        "--running-counts",
        action="store_true",
        help="as --again, and prompts count to SplitwiseSim's queues until they are computed, as in ours",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("simulated/splitwise-sim-runs"),
        metavar="FOLDER",
        help="for its files (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")


def run(arguments: argparse.Namespace) -> int:
    """Simulate and report. Raises: ActorserveError."""
    console = Console()
    console.width = max(console.width, _MIN_WIDTH)
    on_file = read_runs()
    theirs = on_file.runs[arguments.load]
    requests = draw(read_trace(arguments.trace), theirs.rate_per_s, _SECONDS, arguments.seed, together=False)
    cases = {case.arm: case for case in read_experiment(EXPERIMENT, {}).cases}
    say(console, f"{len(requests)} requests on {len(arguments.designs)} clusters")
    steps = {design: (cases[design], requests) for design in arguments.designs}
    ours = simulate_all(steps, arguments.processes)
    columns, latencies = on_file.columns, dict(theirs.latencies)
    if arguments.again or arguments.running_counts:
        columns = _NAMES
        for design in arguments.designs:
            say(console, f"{design}: {THEIRS}")
            latencies[design] = tuple(_again(design, requests, arguments).percentiles())
    table = table_of(arguments.load, columns, latencies, ours)
    print_figures(console, table)
    save_figures(arguments, [table])
    return 0


def _again(design: str, requests: Sequence[TraceRow], arguments: argparse.Namespace) -> SimulatedRun:
    """SplitwiseSim on these requests. Raises: BenchError."""
    build = find_build()
    if build is None:
        raise BenchError(f"SplitwiseSim is not here: {ADVICE}")
    try:
        return their_run.simulate(
            build, requests, MACHINES[design], arguments.out / design, running_counts=arguments.running_counts
        )
    except OSError as error:
        raise BenchError(f"cannot write {error.filename}: {error.strerror}") from None


def table_of(
    name: str,
    columns: tuple[str, ...],
    theirs: Mapping[str, tuple[float, ...]],
    ours: Mapping[str, SimulatedRun],
) -> FigureTable:
    """For each design its latencies on file, and ours over them."""
    places = [_NAMES.index(column) for column in columns]
    labels = {arm["name"]: arm["label"] for arm in read_experiment(EXPERIMENT, {}).plan.arms}
    rows = []
    for design, found in ours.items():
        percentiles = found.percentiles()
        expected = theirs[design]
        ratios = [percentiles[place] / other for place, other in zip(places, expected, strict=True)]
        label = labels[design]
        rows.append(Row(f"{label}: {THEIRS}", tuple(Figure(1e3 * value) for value in expected), "ms"))
        rows.append(Row(f"{label}: ours over it", tuple(map(Figure, ratios)), "x"))
    return FigureTable(f"SplitwiseSim's designs, {name}/s", "cluster", tuple(map(Column, columns)), tuple(rows))

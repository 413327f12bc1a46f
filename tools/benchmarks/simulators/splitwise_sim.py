"""``tools/bench splitwise-sim``: our simulator beside SplitwiseSim, on the same requests and Baseline clusters.

First ours keeps all of SplitwiseSim's rules. Then one rule after the other is set right
(``config/simulations/splitwise-sim.toml``), so that the ratios show what each of its rules is worth.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from rich.console import Console

from actorserve.sim.config import ArrivalsTable, LengthsTable
from actorserve.sim.simulation import Simulation
from actorserve.sim.workload.traces import TraceRow, read_trace
from tools.benchmarks.common.arguments import count, positive
from tools.benchmarks.common.console import print_figures, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.common.paths import ROOT
from tools.benchmarks.simulators import their_run
from tools.benchmarks.simulators.latencies import NAMES, PERCENTILES, SimulatedRun, run_of
from tools.benchmarks.simulators.requests_file import draw, write_for_ours
from tools.benchmarks.simulators.splitwise_sim_build import ADVICE, find_build
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.simulation.experiment import Case, read_experiment

EXPERIMENT: Final = ROOT / "config" / "simulations" / "splitwise-sim.toml"
THEIRS: Final = "SplitwiseSim"
TOGETHER: Final = "prompt and output of one request"
_MIN_WIDTH: Final = 160  # columns of the tables: a narrow terminal wraps them
_MOST_AT_ONCE: Final = 1_000_000  # requests in memory
_COLUMNS: Final = tuple(f"{name} P{percent}" for name in NAMES for percent in PERCENTILES)


@dataclass(frozen=True, slots=True)
class Baseline:
    """A cluster of SplitwiseSim's iso-power script, all machines of one kind. ``profile``: of a machine, for ours."""

    title: str
    num_a100: int
    num_h100: int
    profile: str

    @property
    def groups(self) -> list[dict[str, object]]:
        """Of our simulator's cluster."""
        num_machines = self.num_a100 + self.num_h100
        return [{"name": "machines", "count": num_machines, "profile": self.profile, "kv_tokens": 89_230}]


BASELINES: Final[Mapping[str, Baseline]] = MappingProxyType(
    {
        "h100": Baseline("Baseline-H100, 40 machines", 0, 40, "bloom-176b-h100"),
        "a100": Baseline("Baseline-A100, 70 machines", 70, 0, "bloom-176b-a100"),
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="CSV", help="lengths are drawn from it; Azure's format")
    parser.add_argument("--rate", type=positive, default=70.0, metavar="R", help="requests/s (%(default)s)")
    parser.add_argument("--seconds", type=positive, default=120.0, metavar="S", help="of arrivals (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (%(default)s)")
    parser.add_argument("--baseline", nargs="+", choices=BASELINES, default=[*BASELINES], help="clusters (all)")
    parser.add_argument("--arms", type=count, metavar="N", help="only the first N steps of ours; 1 keeps all its rules")
    parser.add_argument(
        "--processes",
        type=count,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="how many of ours run at once (%(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("simulated/splitwise-sim"),
        metavar="FOLDER",
        help="for the files (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")


def run(arguments: argparse.Namespace) -> int:
    """Simulate and report. Raises: ActorserveError."""
    console = Console()
    console.width = max(console.width, _MIN_WIDTH)
    build = find_build()
    if build is None:
        raise BenchError(f"SplitwiseSim is not here: {ADVICE}")
    if arguments.rate * arguments.seconds > _MOST_AT_ONCE:
        raise BenchError(f"--rate times --seconds is more than {_MOST_AT_ONCE} requests")
    trace = read_trace(arguments.trace)
    apart, together = (
        draw(trace, arguments.rate, arguments.seconds, arguments.seed, together=together) for together in (False, True)
    )
    if not apart:
        raise BenchError("no request is drawn: expected a higher --rate or more --seconds")
    tables: list[FigureTable] = []
    what = f"{arguments.trace.stem} at {arguments.rate:g}/s"
    try:
        for name in arguments.baseline:
            folder = arguments.out / name
            baseline = BASELINES[name]
            say(console, f"{baseline.title}, {len(apart)} requests: {THEIRS}")
            theirs = their_run.simulate(build, apart, their_run.Machines(baseline.num_a100, baseline.num_h100), folder)
            write_for_ours(apart, folder / "requests-for-ours.csv")
            cases = read_experiment(EXPERIMENT, {"cluster": {"groups": baseline.groups}}).cases
            labels = {arm["name"]: arm["label"] for arm in read_experiment(EXPERIMENT, {}).plan.arms}
            steps = {labels[case.arm]: (case, apart) for case in cases[: arguments.arms]}
            if arguments.arms is None:
                steps[TOGETHER] = cases[-1], together
            say(console, f"{baseline.title}, {len(apart)} requests: ours, {len(steps)} times")
            ours = simulate_all(steps, arguments.processes)
            tables += tables_of(f"{baseline.title}, {what}", theirs, ours)
    except OSError as error:
        raise BenchError(f"cannot write {error.filename}: {error.strerror}") from None
    for table in tables:
        print_figures(console, table)
    save_figures(arguments, tables)
    return 0


def simulate_all(steps: Mapping[str, tuple[Case, Sequence[TraceRow]]], num_processes: int) -> dict[str, SimulatedRun]:
    """Our simulator on each step's requests, so many at once. Raises: ActorserveError."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_processes, len(steps)), mp_context=context) as pool:
        running = {label: pool.submit(simulate, *step) for label, step in steps.items()}
        return {label: future.result() for label, future in running.items()}


def simulate(case: Case, requests: Sequence[TraceRow]) -> SimulatedRun:
    """Our simulator on these requests. Raises: ActorserveError."""
    changes = {
        "trace": "the requests",
        "num_requests": None,
        "arrivals": ArrivalsTable(process="trace"),
        "lengths": LengthsTable(like="trace"),
    }
    simulation = Simulation(case.config.model_copy(update=changes), case.profiles, requests)
    began_s = time.process_time()
    results = simulation.run()
    cpu_s = time.process_time() - began_s
    num_completed = results.outcomes.num_completed()
    if num_completed < len(requests):
        raise BenchError(f"{case.arm}: {num_completed} of {len(requests)} requests completed")
    return run_of(results.outcomes, cpu_s)


def tables_of(title: str, theirs: SimulatedRun, ours: Mapping[str, SimulatedRun]) -> list[FigureTable]:
    """Its latencies, ours over its at each step, and the speed of both."""
    expected = theirs.percentiles()
    ratios = {
        label: [value / other for value, other in zip(run.percentiles(), expected, strict=True)]
        for label, run in ours.items()
    }
    columns = tuple(map(Column, _COLUMNS))
    rows = [Row(THEIRS, tuple(Figure(1e3 * value) for value in expected), "ms")]
    rows += [Row(f"ours over it: {label}", tuple(map(Figure, values)), "x") for label, values in ratios.items()]
    first = next(iter(ours.values()))
    speeds = (theirs.requests_per_cpu_s, first.requests_per_cpu_s, first.requests_per_cpu_s / theirs.requests_per_cpu_s)
    speed_columns = (Column(THEIRS, decimals=0), Column("ours", decimals=0), Column("ours over its", "x", 1))
    return [
        FigureTable(title, "simulator", columns, tuple(rows)),
        FigureTable(
            f"Speed: {title}",
            "all its rules",
            speed_columns,
            (Row("requests per CPU second", tuple(map(Figure, speeds))),),
        ),
    ]

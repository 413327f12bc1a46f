"""``tools/bench simulator``: how many requests the simulator serves per second of CPU time, interpreted and compiled.

The builds run in turn, each time in a process of its own, and must give the same results byte for byte.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from tools.benchmarks.common.arguments import count
from tools.benchmarks.common.children import running
from tools.benchmarks.common.console import print_figures, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.common.paths import ROOT
from tools.compiling import SWITCH
from tools.compiling.builds import build_folder
from tools.figures.figure import Column, Figure, FigureTable, Row

EXPERIMENT: Final = ROOT / "config" / "simulations" / "speed.toml"
BUILDS: Final = {"interpreted": "0", "compiled": "1"}
_CHILD: Final = "tools.benchmarks.simulators.one_run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, nargs="?", default=EXPERIMENT, help="an experiment (%(default)s)")
    parser.add_argument("--rounds", type=count, default=3, metavar="N", help="runs of each build (%(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="replace a value of the file; may be repeated"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: ActorserveError."""
    console = Console()
    folder = build_folder()
    if folder is None or not folder.is_dir():
        raise BenchError("these sources are not compiled: tools/compile does that")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in BUILDS}
    for number in range(arguments.rounds):
        for name, switch in BUILDS.items():
            say(console, f"round {number + 1} of {arguments.rounds}: {name}")
            runs[name].append(_run_once(arguments.config, arguments.set, switch))
    if len({result["digest"] for results in runs.values() for result in results}) > 1:
        raise BenchError("the runs have different results; expected the same bytes from both builds")
    table = table_of(arguments.config.stem, runs)
    print_figures(console, table)
    save_figures(arguments, [table])
    return 0


def table_of(title: str, runs: dict[str, list[dict[str, Any]]]) -> FigureTable:
    columns = (
        Column("whole run", "requests/CPU s", 0),
        Column("second half of the arrivals", "requests/CPU s", 0),
        Column("most memory", "MiB", 0),
    )
    rows = [
        Row(
            name,
            tuple(
                Figure.of([float(result[key]) for result in results])
                for key in ("requests_per_cpu_s", "steady_requests_per_cpu_s", "memory_mib")
            ),
        )
        for name, results in runs.items()
    ]
    return FigureTable(f"Speed of the simulator: {title}", "build", columns, tuple(rows))


def _run_once(config: Path, changes: Sequence[str], switch: str) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", _CHILD, str(config), *changes]
    with running(command, environment={SWITCH: switch}) as child:
        out, _ = child.communicate()
    if child.returncode != 0:
        raise BenchError(f"the simulation ended with status {child.returncode}")  # it has said why
    result: dict[str, Any] = json.loads(out)
    return result

"""``tools/bench start``: from a process's start to its first token, in turns with ``import torch`` alone."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track
from rich.table import Table

from actorserve.errors import ActorserveError
from actorserve.model_files.locate import locate
from tools.benchmarks.common.arguments import add_json, add_model
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.common.paths import ROOT
from tools.benchmarks.serving.servers import RunningServer, our_server
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

TITLE = "From a process's start to its first token, with warm caches"
_IMPORT = "import torch"


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from a process's start, and the ratio of their median to that of ``import torch`` alone."""

    name: str
    seconds: Figure
    ratio: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--dtype", default="int8", help="numeric mode of the engine (%(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads of the engine (all cores)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="measurements of each way, in turns; medians are shown (%(default)s)"
    )
    parser.add_argument("--no-server", action="store_true", help="leave out the row of tools/serve")
    add_json(parser)


def _time(command: Sequence[str], environment: dict[str, str]) -> float:
    """Seconds until the command has printed a line. Raises: BenchError."""
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - began
        _, errors = process.communicate()
    if not line:
        raise BenchError(f"nothing was computed: {(errors.strip().splitlines() or ['no reason given'])[-1][:300]}")
    return seconds


def _time_server(model: str, dtype: str) -> float:
    with RunningServer(our_server(model, dtype, 1)) as server:
        return server.first_token_s()


def summarize(times: dict[str, list[float]]) -> list[Start]:
    """``times`` must include those of ``import torch``."""
    figures = {name: Figure.of(seconds) for name, seconds in times.items()}
    base = figures[_IMPORT].median
    return [Start(name, figure, figure.median / base) for name, figure in figures.items()]


def table_of(starts: Sequence[Start]) -> FigureTable:
    columns = (Column("time", "s", 2), Column("over import torch", "x", 2))
    return FigureTable(
        TITLE, "what starts", columns, tuple(Row(start.name, (start.seconds, Figure(start.ratio))) for start in starts)
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    console = Console()
    machine = this_machine()
    try:
        model = str(locate(arguments.model))
    except ActorserveError as error:
        raise BenchError(str(error)) from None
    num_threads = str(arguments.threads or machine.cores)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": num_threads}
    python = (sys.executable, "-P")
    engine = (*python, "-m", "tools.benchmarks.peers.first_token", model, arguments.dtype, num_threads)
    torch_alone = (*python, "-c", "import torch; print(torch.__version__, flush=True)")
    ways: dict[str, Callable[[], float]] = {
        _IMPORT: lambda: _time(torch_alone, environment),
        f"engine, {arguments.dtype}": lambda: _time(engine, environment),
    }
    if not arguments.no_server:
        ways["tools/serve, over HTTP"] = lambda: _time_server(model, arguments.dtype)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in track(range(arguments.rounds + 1), "starting", console=console, transient=True):
        for name, measure in ways.items():
            seconds = measure()
            if number > 0:  # the first round fills the caches
                times[name].append(seconds)
    starts = summarize(times)
    say(console, f"{num_threads} threads; {machine_line(machine)}")
    table = Table("from a process's start to", "seconds", "times import torch")
    for start in starts:
        table.add_row(start.name, f"{start.seconds.median:.2f}", f"{start.ratio:.2f}")
    print_table(console, table)
    save_figures(arguments, [table_of(starts)], machine=machine)
    return 0

"""``tools/bench start``: from a process's start to the first token, beside ``import torch`` alone, in turns."""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from actorserve.errors import ActorserveError
from actorserve.model_files.locate import locate
from tools.benchmarks.errors import BenchError
from tools.benchmarks.machine import machine_line, this_machine
from tools.benchmarks.peers.peer_process import ROOT
from tools.benchmarks.report import write_json
from tools.benchmarks.servers import RunningServer, our_server

_IMPORT = "import torch"


@dataclass(frozen=True, slots=True)
class Start:
    """Median seconds from a process's start, and how many times as long as ``import torch`` alone that is."""

    name: str
    seconds: float
    ratio: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="default", help="default, a GGUF file, or a Hugging Face folder")
    parser.add_argument("--dtype", default="int8", help="of the engine (%(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads of the engine (all cores)")
    parser.add_argument("--rounds", type=int, default=5, help="of each, in turns; medians are shown")
    parser.add_argument("--no-server", action="store_true", help="leave out the row of tools/serve")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")


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
    """``times`` has those of ``import torch``, too."""
    base = statistics.median(times[_IMPORT])
    return [Start(name, statistics.median(each), statistics.median(each) / base) for name, each in times.items()]


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
    console.print(f"{num_threads} threads; {machine_line(machine)}", markup=False, highlight=False, soft_wrap=True)
    table = Table("from a process's start to", "seconds", "times import torch")
    for each in starts:
        table.add_row(each.name, f"{each.seconds:.2f}", f"{each.ratio:.2f}")
    console.print(table)
    if arguments.json is not None:
        write_json({"machine": asdict(machine), "starts": [asdict(each) for each in starts]}, arguments.json)
    return 0

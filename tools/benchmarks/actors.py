"""``tools/bench actors``: a call from one actor to another, ours beside Ray's and beside ZeroMQ alone, in turns.

Each pair is two processes. All pairs live through the whole run, and one is measured at a time.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from actorserve.sim.statistics import percentile
from actorserve.wire.transport import TransportLimits
from tools.benchmarks.errors import BenchError
from tools.benchmarks.machine import machine_line, this_machine
from tools.benchmarks.peers import ray_build
from tools.benchmarks.peers.answers import ask, read_answer
from tools.benchmarks.peers.peer_process import ROOT
from tools.benchmarks.peers.ray_actors import descendants
from tools.benchmarks.processes import Memory, memory_of
from tools.benchmarks.report import write_json

OURS = "actorserve"
PYZMQ = "pyzmq alone"
RAY = "Ray"
MAX_WINDOW = TransportLimits().send_queue
_PEERS = "tools.benchmarks.peers"
_STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Contestant:
    """A pair of actors: the module of its calling one, and the Python that runs it."""

    name: str
    module: str
    python: Path = Path(sys.executable)


@dataclass(frozen=True, slots=True)
class Result:
    """One pair's figures. The first two are of calls one at a time; all are medians over the rounds.

    ``memory`` is of the two actors when idle, ``memory_in_all`` of all processes that run on their account.
    """

    name: str
    round_trip_p50_s: float
    round_trip_p99_s: float
    sequential_calls_per_s: float
    pipelined_calls_per_s: float
    memory: Memory
    memory_in_all: Memory


class Pair:
    """Two actors, and what they need, from their start to the end of the ``with`` block."""

    def __init__(self, contestant: Contestant) -> None:
        self.name = contestant.name
        self._folder = tempfile.TemporaryDirectory(prefix="actors-", ignore_cleanup_errors=True)
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed at the end
        self._process = subprocess.Popen(
            [str(contestant.python), "-P", "-m", contestant.module, self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,  # a Ctrl-C is for the measurement, which then ends its pairs
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        started = descendants(self._process.pid)
        try:
            self._process.communicate(timeout=_STOP_TIMEOUT_S if kind is None else _STOP_TIMEOUT_S / 4)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()
            self._process.communicate()
        for process_id in started:  # what it could not end itself
            if _belongs_to(process_id, self._process.pid):
                os.kill(process_id, signal.SIGKILL)
        self._errors.close()
        self._folder.cleanup()

    def wait_ready(self) -> None:
        """Raises: BenchError, with the pair's own reason."""
        self._read()

    def one_at_a_time(self, num_calls: int) -> list[float]:
        """Seconds of each round trip. Raises: BenchError."""
        return [float(each) for each in self._ask({"one_at_a_time": num_calls})["seconds"]]

    def pipelined(self, num_calls: int, window: int) -> float:
        """Seconds of all of them, ``window`` at once. Raises: BenchError."""
        return float(self._ask({"pipelined": num_calls, "window": window})["seconds"])

    def memory(self) -> tuple[Memory, Memory]:
        """Of the two actors, and of all that runs on their account. Raises: BenchError."""
        told = self._ask({"processes": True})
        return memory_of(told["pair"]), memory_of(told["all"])

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        return ask(self._process, self._errors, self.name, question)

    def _read(self) -> dict[str, Any]:
        return read_answer(self._process, self._errors, self.name)


def _belongs_to(process_id: int, session: int) -> bool:
    try:
        return os.getsid(process_id) == session
    except ProcessLookupError:
        return False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="everyone takes a turn in each; medians are shown")
    parser.add_argument("--calls", type=int, default=1000, help="one at a time, of each turn (%(default)s)")
    parser.add_argument("--pipelined-calls", type=int, default=5000, metavar="N", help="of each turn (%(default)s)")
    parser.add_argument("--window", type=int, default=1000, help="pipelined calls at once (%(default)s)")
    parser.add_argument("--without-ray", action="store_true", help="measure ours and pyzmq alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")


def contestants(arguments: argparse.Namespace, console: Console) -> list[Contestant]:
    """Ours first. Ray is left out where it was not installed, with a line that says so."""
    found = [Contestant(OURS, f"{_PEERS}.our_actors"), Contestant(PYZMQ, f"{_PEERS}.pyzmq_actors")]
    if arguments.without_ray:
        return found
    python = ray_build.find_ray()
    if python is None:
        console.print(f"without {RAY}: {ray_build.ADVICE}", highlight=False, soft_wrap=True)
        return found
    return [*found, Contestant(RAY, f"{_PEERS}.ray_actors", python)]


def summarize(
    name: str,
    round_trips_s: Sequence[Sequence[float]],
    pipelined_calls_per_s: Sequence[float],
    memory: tuple[Memory, Memory],
) -> Result:
    """``round_trips_s`` has those of each round."""
    return Result(
        name,
        statistics.median(percentile(sorted(each), 50) for each in round_trips_s),
        statistics.median(percentile(sorted(each), 99) for each in round_trips_s),
        statistics.median(len(each) / sum(each) for each in round_trips_s),
        statistics.median(pipelined_calls_per_s),
        *memory,
    )


def ratios(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """How many times better ours is than each of the others; above one is better, for memory and round trips too."""
    ours = next(each for each in results if each.name == OURS)
    return {
        each.name: {
            "round_trip_p50": each.round_trip_p50_s / ours.round_trip_p50_s,
            "round_trip_p99": each.round_trip_p99_s / ours.round_trip_p99_s,
            "sequential_calls_per_s": ours.sequential_calls_per_s / each.sequential_calls_per_s,
            "pipelined_calls_per_s": ours.pipelined_calls_per_s / each.pipelined_calls_per_s,
            "memory_in_all": each.memory_in_all.rss_bytes / ours.memory_in_all.rss_bytes,
        }
        for each in results
        if each is not ours
    }


def measure(pairs: Sequence[Pair], arguments: argparse.Namespace, progress: Progress) -> list[Result]:
    """Everyone's turn in each round, beginning with another one each time. Raises: BenchError."""
    for pair in pairs:  # warm up
        pair.one_at_a_time(min(arguments.calls, 200))
        pair.pipelined(min(arguments.pipelined_calls, 1000), arguments.window)
    memory = {pair.name: pair.memory() for pair in pairs}
    round_trips_s: dict[str, list[list[float]]] = {pair.name: [] for pair in pairs}
    pipelined: dict[str, list[float]] = {pair.name: [] for pair in pairs}
    bar = progress.add_task("measuring", total=arguments.rounds * len(pairs))
    for number in range(arguments.rounds):
        first = number % len(pairs)
        for pair in (*pairs[first:], *pairs[:first]):
            round_trips_s[pair.name].append(pair.one_at_a_time(arguments.calls))
            seconds = pair.pipelined(arguments.pipelined_calls, arguments.window)
            pipelined[pair.name].append(arguments.pipelined_calls / seconds)
            progress.advance(bar)
    return [summarize(pair.name, round_trips_s[pair.name], pipelined[pair.name], memory[pair.name]) for pair in pairs]


def show(results: Sequence[Result], window: int, console: Console) -> None:
    table = Table(
        "actors",
        "P50, ms",
        "P99, ms",
        "calls/s, 1",
        f"calls/s, {window}",
        "RSS of two",
        "of all",
        "PSS of all",
        title="round trips; calls/s, so many at once; MiB when idle",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for each in results:
        pss = each.memory_in_all.pss_bytes
        table.add_row(
            each.name,
            f"{each.round_trip_p50_s * 1e3:.3f}",
            f"{each.round_trip_p99_s * 1e3:.3f}",
            f"{each.sequential_calls_per_s:.0f}",
            f"{each.pipelined_calls_per_s:.0f}",
            f"{each.memory.rss_bytes / 2**20:.0f}",
            f"{each.memory_in_all.rss_bytes / 2**20:.0f} ({each.memory_in_all.num_processes})",
            "-" if pss is None else f"{pss / 2**20:.0f}",
        )
    console.print(table)
    for name, ratio in ratios(results).items():
        console.print(
            f"{OURS} to {name}: round trip {ratio['round_trip_p50']:.2f} times as fast (P99 "
            f"{ratio['round_trip_p99']:.2f}), {ratio['sequential_calls_per_s']:.2f} times the calls/s one at a time, "
            f"{ratio['pipelined_calls_per_s']:.2f} times pipelined; 1/{ratio['memory_in_all']:.2f} of the memory",
            highlight=False,
            soft_wrap=True,
        )


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    if min(arguments.rounds, arguments.calls, arguments.pipelined_calls, arguments.window) < 1:
        raise BenchError("--rounds, --calls, --pipelined-calls and --window must be at least 1")
    if arguments.window > MAX_WINDOW:
        raise BenchError(f"--window must be at most {MAX_WINDOW}: a transport's queue takes no more")
    console = Console()
    machine = this_machine()
    with ExitStack() as processes, Progress(console=console, transient=True) as progress:
        starting = progress.add_task("starting actors", total=None)
        pairs = []
        for contestant in contestants(arguments, console):
            pair = processes.enter_context(Pair(contestant))
            try:
                pair.wait_ready()
            except BenchError as error:
                if contestant.name == OURS:
                    raise
                console.print(f"without {error}", markup=False, highlight=False, soft_wrap=True)
                continue
            pairs.append(pair)
        progress.update(starting, completed=1, total=1)
        results = measure(pairs, arguments, progress)
    console.print(machine_line(machine), markup=False, highlight=False, soft_wrap=True)
    show(results, arguments.window, console)
    if arguments.json is not None:
        figures = {
            "machine": asdict(machine),
            "ray_version": ray_build.VERSION,
            "window": arguments.window,
            "results": [asdict(each) for each in results],
            "ratios": ratios(results),
        }
        write_json(figures, arguments.json)
    return 0

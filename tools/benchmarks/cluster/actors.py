"""``tools/bench actors``: calls from one actor to another; our actors, Ray's and bare ZeroMQ take turns.

Each pair of actors is two processes. All pairs live through the whole run, and one pair is measured at a time.
"""

import argparse
import os
import signal
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
from tools.benchmarks.common.answers import ask, read_answer
from tools.benchmarks.common.arguments import add_json
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.common.paths import ROOT
from tools.benchmarks.common.processes import Memory, memory_of
from tools.benchmarks.peers import ray_build
from tools.benchmarks.peers.ray_actors import descendants
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

TITLE = "Calls between two actors on one host"
OURS = "actorserve"
PYZMQ = "bare pyzmq"
RAY = "Ray"
MAX_WINDOW = TransportLimits().send_queue
_PEERS = "tools.benchmarks.peers"
_STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Contestant:
    """A pair of actors: the module of the calling actor, and the Python that runs it."""

    name: str
    module: str
    python: Path = Path(sys.executable)


@dataclass(frozen=True, slots=True)
class Result:
    """One pair's figures over all rounds. Round trips are of calls one at a time.

    ``memory``: of the two idle actors. ``memory_in_all``: of all processes that run for them.
    """

    name: str
    round_trip_p50_ms: Figure
    round_trip_p99_ms: Figure
    sequential_calls_per_s: Figure
    pipelined_calls_per_s: Figure
    memory: Memory
    memory_in_all: Memory


class Pair:
    """Two actors and their helper processes, from their start to the end of the ``with`` block."""

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
            start_new_session=True,  # so that only the measurement sees a Ctrl-C, and ends its pairs
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
        for process_id in started:  # processes that the pair could not end itself
            if _belongs_to(process_id, self._process.pid):
                os.kill(process_id, signal.SIGKILL)
        self._errors.close()
        self._folder.cleanup()

    def wait_ready(self) -> None:
        """Raises: BenchError, with the pair's reason."""
        self._read()

    def one_at_a_time(self, num_calls: int) -> list[float]:
        """Seconds of each round trip. Raises: BenchError."""
        return [float(seconds) for seconds in self._ask({"one_at_a_time": num_calls})["seconds"]]

    def pipelined(self, num_calls: int, window: int) -> float:
        """Seconds of all calls together, ``window`` at once. Raises: BenchError."""
        return float(self._ask({"pipelined": num_calls, "window": window})["seconds"])

    def memory(self) -> tuple[Memory, Memory]:
        """The memory of the two actors, and of all processes that run for them. Raises: BenchError."""
        told = self._ask({"processes": True})
        return memory_of(told["pair"]), memory_of(told["all"])

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        return ask(self._process, self._errors, self.name, command)

    def _read(self) -> dict[str, Any]:
        return read_answer(self._process, self._errors, self.name)


def _belongs_to(process_id: int, session: int) -> bool:
    try:
        return os.getsid(process_id) == session
    except ProcessLookupError:
        return False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds in which each pair has a turn; medians are shown (%(default)s)"
    )
    parser.add_argument("--calls", type=int, default=1000, help="calls one at a time in each turn (%(default)s)")
    parser.add_argument(
        "--pipelined-calls", type=int, default=5000, metavar="N", help="pipelined calls in each turn (%(default)s)"
    )
    parser.add_argument("--window", type=int, default=1000, help="pipelined calls at once (%(default)s)")
    parser.add_argument("--without-ray", action="store_true", help="measure only ours and bare pyzmq")
    add_json(parser)


def contestants(arguments: argparse.Namespace, console: Console) -> list[Contestant]:
    """The pairs, ours first. Ray is left out if it is not installed, and a line says so."""
    found = [Contestant(OURS, f"{_PEERS}.our_actors"), Contestant(PYZMQ, f"{_PEERS}.pyzmq_actors")]
    if arguments.without_ray:
        return found
    python = ray_build.find_ray()
    if python is None:
        say(console, f"without {RAY}: {ray_build.ADVICE}")
        return found
    return [*found, Contestant(RAY, f"{_PEERS}.ray_actors", python)]


def summarize(
    name: str,
    round_trips_s: Sequence[Sequence[float]],
    pipelined_calls_per_s: Sequence[float],
    memory: tuple[Memory, Memory],
) -> Result:
    """``round_trips_s`` holds the round trips of each round."""
    return Result(
        name,
        Figure.of([1e3 * percentile(sorted(times), 50) for times in round_trips_s]),
        Figure.of([1e3 * percentile(sorted(times), 99) for times in round_trips_s]),
        Figure.of([len(times) / sum(times) for times in round_trips_s]),
        Figure.of(pipelined_calls_per_s),
        *memory,
    )


def ratios(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """How many times better our pair is than every other pair; above one is better, also for memory and round trips."""
    ours = next(result for result in results if result.name == OURS)
    return {
        other.name: {
            "round_trip_p50": other.round_trip_p50_ms.median / ours.round_trip_p50_ms.median,
            "round_trip_p99": other.round_trip_p99_ms.median / ours.round_trip_p99_ms.median,
            "sequential_calls_per_s": ours.sequential_calls_per_s.median / other.sequential_calls_per_s.median,
            "pipelined_calls_per_s": ours.pipelined_calls_per_s.median / other.pipelined_calls_per_s.median,
            "memory_in_all": other.memory_in_all.rss_bytes / ours.memory_in_all.rss_bytes,
        }
        for other in results
        if other is not ours
    }


def table_of(results: Sequence[Result], window: int) -> FigureTable:
    columns = (
        Column("round trip P50", "ms", 3),
        Column("round trip P99", "ms", 3),
        Column("calls/s, one at a time", decimals=0),
        Column(f"calls/s, {window:,} at once", decimals=0),
        Column("memory, idle", "MiB", 0),
    )
    rows = [
        Row(
            result.name,
            (
                result.round_trip_p50_ms,
                result.round_trip_p99_ms,
                result.sequential_calls_per_s,
                result.pipelined_calls_per_s,
                Figure(result.memory_in_all.rss_bytes / 2**20, rounds=1),
            ),
        )
        for result in results
    ]
    return FigureTable(TITLE, "actors", columns, tuple(rows))


def measure(pairs: Sequence[Pair], arguments: argparse.Namespace, progress: Progress) -> list[Result]:
    """Measure every pair in each round. Another pair begins each round. Raises: BenchError."""
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
        title="round trips; calls/s by the number at once; MiB when idle",
    )
    for result in results:
        pss = result.memory_in_all.pss_bytes
        table.add_row(
            result.name,
            f"{result.round_trip_p50_ms.median:.3f}",
            f"{result.round_trip_p99_ms.median:.3f}",
            f"{result.sequential_calls_per_s.median:.0f}",
            f"{result.pipelined_calls_per_s.median:.0f}",
            f"{result.memory.rss_bytes / 2**20:.0f}",
            f"{result.memory_in_all.rss_bytes / 2**20:.0f} ({result.memory_in_all.num_processes})",
            "-" if pss is None else f"{pss / 2**20:.0f}",
        )
    print_table(console, table)
    for name, ratio in ratios(results).items():
        say(
            console,
            f"{OURS} to {name}: round trip {ratio['round_trip_p50']:.2f} times as fast (P99 "
            f"{ratio['round_trip_p99']:.2f}), {ratio['sequential_calls_per_s']:.2f} times the calls/s one at a time, "
            f"{ratio['pipelined_calls_per_s']:.2f} times pipelined; 1/{ratio['memory_in_all']:.2f} of the memory",
        )


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    if min(arguments.rounds, arguments.calls, arguments.pipelined_calls, arguments.window) < 1:
        raise BenchError("--rounds, --calls, --pipelined-calls and --window must be at least 1")
    if arguments.window > MAX_WINDOW:
        raise BenchError(f"--window must be at most {MAX_WINDOW}: a transport's queue holds no more")
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
                say(console, f"without {error}")
                continue
            pairs.append(pair)
        progress.update(starting, completed=1, total=1)
        results = measure(pairs, arguments, progress)
    say(console, machine_line(machine))
    show(results, arguments.window, console)
    details = {
        "ray_version": ray_build.VERSION,
        "window": arguments.window,
        "results": [asdict(result) for result in results],
        "ratios": ratios(results),
    }
    save_figures(arguments, [table_of(results, arguments.window)], details, machine)
    return 0

"""``tools/bench coordinator``: how many requests per second the coordinator places, and what that costs it.

The coordinator is the real process. Another one stands for its workers and gateways, with real messages: hellos,
heartbeats, a load report of each worker every ``cluster.load_report_s``, and requests at a given rate. Rates rise until
fewer than 97 % of the requests are answered in time, or the slowest 1 % wait for longer than 50 ms.

With ``--shards`` there are so many coordinators, each with its share of the workers and of the requests.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from actorserve.actors.membership import COORDINATOR_NAME, MAX_PEERS
from actorserve.actors.node import address_of
from actorserve.processes.child import command_line, write_settings
from actorserve.processes.launch import replace
from actorserve.processes.status import PARENT_PID
from actorserve.settings import Settings
from tools.benchmarks.coordinator_alone import CoordinatorAlone
from tools.benchmarks.engine import counts
from tools.benchmarks.errors import BenchError
from tools.benchmarks.load_generator import Load, Measured, Options
from tools.benchmarks.machine import machine_line, this_machine
from tools.benchmarks.peers.peer_process import ROOT
from tools.benchmarks.report import write_json

MIN_ANSWERED = 0.97
MAX_P99_S = 0.05
BUSY = 0.9  # a generator that takes more of its core may be what limits
_BISECTIONS = 3
_SETTLE_S = 1.0
_STOP_TIMEOUT_S = 10.0
_MAX_FOLDER_BYTES = 85  # a socket's path holds 107 bytes


@dataclass(frozen=True, slots=True)
class Point:
    """One rate at one number of workers. CPU shares are of one core, the busiest shard's."""

    num_workers: int
    asked: float
    answered: float
    num_refused: int
    p50_s: float | None
    p99_s: float | None
    coordinator_cpu: float
    generator_cpu: float
    num_unsent: int
    num_lost: int

    @property
    def is_held(self) -> bool:
        return self.answered >= MIN_ANSWERED * self.asked and self.p99_s is not None and self.p99_s <= MAX_P99_S


@dataclass(frozen=True, slots=True)
class AlonePoint:
    """What a second with so many requests costs without sockets, in CPU seconds."""

    num_workers: int
    rate: float
    cpu_share: float


def join(num_workers: int, shards: "list[Measured]") -> Point:
    """Sums of the rates, and the worst of the rest."""
    p50s = [each.p50_s for each in shards if each.p50_s is not None]
    p99s = [each.p99_s for each in shards if each.p99_s is not None]
    return Point(
        num_workers,
        asked=sum(each.asked for each in shards),
        answered=sum(each.answered for each in shards),
        num_refused=sum(each.num_refused for each in shards),
        p50_s=max(p50s, default=None),
        p99_s=max(p99s, default=None),
        coordinator_cpu=max(each.coordinator_cpu for each in shards),
        generator_cpu=max(each.generator_cpu for each in shards),
        num_unsent=sum(each.num_unsent for each in shards),
        num_lost=sum(each.num_lost for each in shards),
    )


def find_limit(is_held: Callable[[float], bool], rates: tuple[int, ...]) -> float:
    """The highest rate that is held: those given, then doubled ones until one is not held, then between these two.

    0 where not even the first is held.
    """
    good, rising = 0.0, iter(sorted(rates))
    rate = float(next(rising))
    while is_held(rate):
        good = rate
        rate = float(next(rising, 2 * rate))
    bad = rate
    for _ in range(_BISECTIONS if good else 0):
        middle = (good + bad) / 2
        if is_held(middle):
            good = middle
        else:
            bad = middle
    return good


class Shard:
    """A coordinator, and the process that loads it, from their start to the end of the ``with`` block.

    Raises: BenchError where they do not meet.
    """

    def __init__(self, num_workers: int, arguments: argparse.Namespace, profile: Path | None) -> None:
        settings = settings_of(arguments)
        self._stack = ExitStack()
        with ExitStack() as stack:
            folder = stack.enter_context(_runtime_dir())
            write_settings(settings, folder / "settings.json")
            profiler = () if profile is None else ("-m", "cProfile", "-o", str(profile.resolve()))
            child = command_line(COORDINATOR_NAME, folder / "settings.json", folder)
            self._coordinator = stack.enter_context(
                _running([sys.executable, "-P", *profiler, "-m", "actorserve", "coordinator", *child])
            )
            num_links = min(arguments.links or num_workers, num_workers)
            options = Options(
                address_of(COORDINATOR_NAME, folder),
                self._coordinator.pid,
                num_workers,
                arguments.gateways,
                tuple(address_of(f"link-{number}", folder) for number in range(num_links)),
                settings.cluster.load_report_s,
                settings.cluster.heartbeat_s,
                settings.cluster.death_after_s,
            )
            command = [sys.executable, "-P", "-m", "tools.benchmarks.load_generator", json.dumps(asdict(options))]
            self._generator = stack.enter_context(_running(command))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def wait_ready(self) -> None:
        """Raises: BenchError."""
        self._read()

    def begin(self, load: Load) -> None:
        assert self._generator.stdin is not None
        self._generator.stdin.write(json.dumps(asdict(load)) + "\n")
        self._generator.stdin.flush()

    def result(self) -> Measured:
        """Raises: BenchError."""
        return Measured(**self._read())

    def _read(self) -> dict[str, Any]:
        assert self._generator.stdout is not None
        line = self._generator.stdout.readline()
        if not line or self._coordinator.poll() is not None:
            who = "the load generator" if not line else "the coordinator"
            raise BenchError(f"{who} has ended early")
        told: dict[str, Any] = json.loads(line)
        return told


@contextmanager
def _runtime_dir() -> Iterator[Path]:
    """Raises: BenchError where sockets' paths would be too long."""
    with tempfile.TemporaryDirectory(prefix="actorserve-") as folder:
        if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
            raise BenchError(f"the path of {folder} is too long for sockets; set TMPDIR to a shorter one")
        yield Path(folder)


@contextmanager
def _running(command: list[str]) -> "Iterator[subprocess.Popen[str]]":
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), PARENT_PID: str(os.getpid())},
        start_new_session=True,  # a Ctrl-C is for the measurement, which then ends its processes
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=_STOP_TIMEOUT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.communicate()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=counts, default=(16, 100, 1000), metavar="N,N", help="(16,100,1000)")
    parser.add_argument("--gateways", type=int, default=4, help="that ask for places (%(default)s)")
    parser.add_argument("--rates", type=counts, default=(1000, 2000, 5000), metavar="N,N", help="requests/s, first")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement (%(default)s)")
    parser.add_argument("--links", type=int, help="addresses that the workers share (each has its own)")
    parser.add_argument("--shards", type=int, default=1, help="coordinators, each with its share of all (%(default)s)")
    parser.add_argument(
        "--load-report-s", type=float, metavar="S", help="a worker's time between reports (as configured)"
    )
    parser.add_argument("--no-search", action="store_true", help="measure the given rates only, whatever they show")
    parser.add_argument("--in-process", action="store_true", help="the coordinator without sockets: its CPU time alone")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of the first coordinator, by cProfile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The defaults, but for what was asked for."""
    settings = Settings()
    return replace(settings, "cluster", load_report_s=arguments.load_report_s or settings.cluster.load_report_s)


def measure(num_workers: int, arguments: argparse.Namespace, console: Console) -> list[Point]:
    """All rates at one number of workers. Raises: BenchError."""
    points: list[Point] = []
    with ExitStack() as stack:
        shards = start(num_workers, arguments, stack, console)

        def is_held(rate: float) -> bool:
            nonlocal shards
            if points and points[-1].num_lost:  # so overloaded that it took processes for dead
                stack.close()
                shards = start(num_workers, arguments, stack, console)
            with console.status(f"{num_workers} workers, {rate:.0f} requests/s"):
                for shard in shards:
                    shard.begin(Load(rate / len(shards), _SETTLE_S, arguments.seconds))
                points.append(join(num_workers, [shard.result() for shard in shards]))
            return points[-1].is_held

        if arguments.no_search:
            for rate in arguments.rates:
                is_held(rate)
        else:
            find_limit(lambda rate: is_held(rate) or is_held(rate), arguments.rates)  # a hiccup is no limit
    return sorted(points, key=lambda point: point.asked)


def start(num_workers: int, arguments: argparse.Namespace, stack: ExitStack, console: Console) -> list[Shard]:
    """All shards, to the end of ``stack``; everybody has met. Raises: BenchError."""
    shards = []
    for number in range(arguments.shards):
        share = num_workers // arguments.shards + (number < num_workers % arguments.shards)
        shards.append(stack.enter_context(Shard(share, arguments, None if number else arguments.profile)))
    with console.status(f"{num_workers} workers meet the coordinator"):
        for shard in shards:
            shard.wait_ready()
    return shards


def measure_alone(num_workers: int, arguments: argparse.Namespace, console: Console) -> list[AlonePoint]:
    """All rates at one number of workers; the last one takes about a whole core. Raises: BenchError."""
    settings = settings_of(arguments)
    with console.status(f"{num_workers} workers, in process"):
        alone = CoordinatorAlone(num_workers, arguments.gateways, settings.cluster)
        points = [
            AlonePoint(num_workers, rate, alone.cpu_share(rate, arguments.seconds)) for rate in sorted(arguments.rates)
        ]
        if not arguments.no_search:
            rate = whole_core(points)
            points.append(AlonePoint(num_workers, rate, alone.cpu_share(rate, arguments.seconds)))
    return points


def whole_core(points: list[AlonePoint]) -> float:
    """The rate at which a core is full, along the line through the first point and the last. Raises: BenchError."""
    first, last = points[0], points[-1]
    if last.cpu_share <= first.cpu_share:
        raise BenchError("it takes two different --rates to find where a core is full")
    per_request_s = (last.cpu_share - first.cpu_share) / (last.rate - first.rate)
    return max(first.rate + (1.0 - first.cpu_share) / per_request_s, 1.0)


def show(points: list[Point], console: Console) -> None:
    table = Table(
        "workers", "asked/s", "answered/s", "P50, ms", "P99, ms", "CPU", "generator's", "held", title="CPU: of one core"
    )
    for column in table.columns[:-1]:
        column.justify = "right"
    for each in points:
        table.add_row(
            str(each.num_workers),
            f"{each.asked:.0f}",
            f"{each.answered:.0f}",
            "-" if each.p50_s is None else f"{each.p50_s * 1e3:.1f}",
            "-" if each.p99_s is None else f"{each.p99_s * 1e3:.1f}",
            f"{each.coordinator_cpu:.0%}",
            f"{each.generator_cpu:.0%}",
            "yes" if each.is_held else "no, but its load was late" if each.generator_cpu > BUSY else "no",
        )
    console.print(table)
    refused, unsent, fenced = (
        sum(getattr(each, name) for each in points) for name in ("num_refused", "num_unsent", "num_lost")
    )
    if refused or unsent or fenced:
        console.print(f"{refused} requests refused, {unsent} frames not sent, {fenced} held for dead")


def show_alone(points: list[AlonePoint], console: Console) -> None:
    table = Table("workers", "requests/s", "CPU seconds a second")
    for column in table.columns:
        column.justify = "right"
    for each in points:
        table.add_row(str(each.num_workers), f"{each.rate:.0f}", f"{each.cpu_share:.2f}")
    console.print(table)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    if min(arguments.gateways, arguments.shards, arguments.links or 1) < 1:
        raise BenchError("--gateways, --shards and --links must be at least 1")
    if min(arguments.seconds, arguments.load_report_s or 1.0) <= 0.0:
        raise BenchError("--seconds and --load-report-s must be more than 0")
    if max(arguments.workers) + arguments.gateways > MAX_PEERS or min(arguments.workers) < arguments.shards:
        raise BenchError(f"--workers must be at least --shards, and with the gateways at most {MAX_PEERS}")
    console = Console()
    machine = this_machine()
    console.print(machine_line(machine), markup=False, highlight=False, soft_wrap=True)
    figures: dict[str, Any] = {"machine": asdict(machine), "shards": arguments.shards}
    if arguments.in_process:
        alone = [point for count in arguments.workers for point in measure_alone(count, arguments, console)]
        show_alone(alone, console)
        figures["in_process"] = [asdict(each) for each in alone]
    else:
        points = [point for count in arguments.workers for point in measure(count, arguments, console)]
        show(points, console)
        figures["points"] = [asdict(each) | {"is_held": each.is_held} for each in points]
    if arguments.json is not None:
        write_json(figures, arguments.json)
    return 0

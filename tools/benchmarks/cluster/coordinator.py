"""``tools/bench coordinator``: how many requests per second the coordinator places, and at what CPU time.

The coordinator is the real process. Another process stands for its workers and gateways, with real messages: hellos,
heartbeats, a load report of each worker every ``cluster.load_report_s``, and requests at a given rate. Rates rise until
fewer than 97 % of the requests are answered in time, or the slowest 1 % wait for longer than 50 ms.

``--shards`` starts several coordinators, each with its share of the workers and of the requests.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from actorserve.actors.membership import COORDINATOR_NAME, MAX_PEERS
from actorserve.cluster.network import LocalNetwork
from actorserve.processes.child import command_line, write_settings
from actorserve.processes.launch import replace
from actorserve.settings import Settings
from tools.benchmarks.cluster.coordinator_alone import CoordinatorAlone
from tools.benchmarks.cluster.load_generator import Load, Measured, Options
from tools.benchmarks.cluster.waiting_line import report_cpu_s
from tools.benchmarks.common.arguments import add_json, counts
from tools.benchmarks.common.children import running, socket_folder
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

TITLE = "The coordinator process under load"
ALONE_TITLE = "The coordinator without sockets"
WAITING_TITLE = "A load report while requests wait for a full kind of workers"
MIN_ANSWERED = 0.97
MAX_P99_S = 0.05
BUSY = 0.9  # a load generator that uses more of its core may itself be the limit
_BISECTIONS = 3
_SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Point:
    """One rate at one number of workers. CPU shares are those of one core in the busiest shard."""

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
    """The CPU seconds that one second with this many requests costs without sockets."""

    num_workers: int
    rate: float
    cpu_share: float


def join(num_workers: int, shards: "list[Measured]") -> Point:
    """Sum the shards' rates, and take the worst of every other figure."""
    p50s = [shard.p50_s for shard in shards if shard.p50_s is not None]
    p99s = [shard.p99_s for shard in shards if shard.p99_s is not None]
    return Point(
        num_workers,
        asked=sum(shard.asked for shard in shards),
        answered=sum(shard.answered for shard in shards),
        num_refused=sum(shard.num_refused for shard in shards),
        p50_s=max(p50s, default=None),
        p99_s=max(p99s, default=None),
        coordinator_cpu=max(shard.coordinator_cpu for shard in shards),
        generator_cpu=max(shard.generator_cpu for shard in shards),
        num_unsent=sum(shard.num_unsent for shard in shards),
        num_lost=sum(shard.num_lost for shard in shards),
    )


def find_limit(is_held: Callable[[float], bool], rates: tuple[int, ...]) -> float:
    """The highest rate that is held: first the given rates, then doubled ones until one is not held, then by bisection.

    0 if not even the first is held.
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
    """A coordinator, and the process that loads it, from their start to the end of the ``with`` block. Their sockets
    are in ``folder``.

    Raises: BenchError, if the two do not connect.
    """

    def __init__(self, num_workers: int, arguments: argparse.Namespace, profile: Path | None) -> None:
        settings = settings_of(arguments)
        self._stack = ExitStack()
        with ExitStack() as stack:
            folder = stack.enter_context(socket_folder())
            write_settings(settings, folder / "settings.json")
            profiler = () if profile is None else ("-m", "cProfile", "-o", str(profile.resolve()))
            child = command_line(COORDINATOR_NAME, folder / "settings.json", folder)
            self._coordinator = stack.enter_context(
                running([sys.executable, "-P", *profiler, "-m", "actorserve", "coordinator", *child])
            )
            num_links = min(arguments.links or num_workers, num_workers)
            options = Options(
                LocalNetwork(folder).coordinator().bind,
                self._coordinator.pid,
                num_workers,
                arguments.gateways,
                tuple(LocalNetwork(folder).process(f"link-{number}").bind for number in range(num_links)),
                settings.cluster.load_report_s,
                settings.cluster.heartbeat_s,
                settings.cluster.death_after_s,
            )
            command = [
                sys.executable,
                "-P",
                "-m",
                "tools.benchmarks.cluster.load_generator",
                json.dumps(asdict(options)),
            ]
            self._generator = stack.enter_context(running(command))
            self.folder, self.coordinator_id = folder, self._coordinator.pid
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
            process = "the load generator" if not line else "the coordinator"
            raise BenchError(f"{process} has ended early")
        told: dict[str, Any] = json.loads(line)
        return told


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=counts, default=(16, 100, 1000), metavar="N,N", help="numbers of workers (16,100,1000)"
    )
    parser.add_argument("--gateways", type=int, default=4, help="gateways that ask for places (%(default)s)")
    parser.add_argument(
        "--rates", type=counts, default=(1000, 2000, 5000), metavar="N,N", help="requests/s to begin with"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement (%(default)s)")
    parser.add_argument("--links", type=int, help="addresses that the workers share (one for each worker)")
    parser.add_argument(
        "--shards", type=int, default=1, help="coordinators, each with its share of workers and requests (%(default)s)"
    )
    parser.add_argument(
        "--load-report-s", type=float, metavar="S", help="a worker's time between reports (the setting's default)"
    )
    parser.add_argument("--no-search", action="store_true", help="measure the given rates only")
    parser.add_argument(
        "--in-process", action="store_true", help="measure the CPU time of a coordinator without sockets"
    )
    parser.add_argument(
        "--waiting",
        type=int,
        metavar="N",
        help="measure the CPU time of a load report while N requests wait for one of two kinds of workers",
    )
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a cProfile of the first coordinator")
    add_json(parser)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The default settings, except for what the arguments change."""
    settings = Settings()
    return replace(settings, "cluster", load_report_s=arguments.load_report_s or settings.cluster.load_report_s)


def measure(num_workers: int, arguments: argparse.Namespace, console: Console) -> list[Point]:
    """All rates at one number of workers. Raises: BenchError."""
    points: list[Point] = []
    with ExitStack() as stack:
        shards = start(num_workers, arguments, stack, console)

        def is_held(rate: float) -> bool:
            nonlocal shards
            if points and points[-1].num_lost:  # an overloaded coordinator has declared processes dead
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
            find_limit(
                lambda rate: is_held(rate) or is_held(rate), arguments.rates
            )  # a rate must fail twice to count as too high
    return sorted(points, key=lambda point: point.asked)


def start(num_workers: int, arguments: argparse.Namespace, stack: ExitStack, console: Console) -> list[Shard]:
    """All shards, which run until ``stack`` is closed and have connected. Raises: BenchError."""
    shards = []
    for number in range(arguments.shards):
        share = num_workers // arguments.shards + (number < num_workers % arguments.shards)
        shards.append(stack.enter_context(Shard(share, arguments, None if number else arguments.profile)))
    with console.status(f"{num_workers} workers meet the coordinator"):
        for shard in shards:
            shard.wait_ready()
    return shards


def measure_alone(num_workers: int, arguments: argparse.Namespace, console: Console) -> list[AlonePoint]:
    """All rates at one number of workers; the last rate takes about a whole core. Raises: BenchError."""
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
        raise BenchError("finding where a core is full takes two different --rates")
    per_request_s = (last.cpu_share - first.cpu_share) / (last.rate - first.rate)
    return max(first.rate + (1.0 - first.cpu_share) / per_request_s, 1.0)


def show(points: list[Point], console: Console) -> None:
    table = Table(
        "workers",
        "asked/s",
        "answered/s",
        "P50, ms",
        "P99, ms",
        "CPU",
        "generator's",
        "held",
        title="CPU as a share of one core",
    )
    for point in points:
        table.add_row(
            str(point.num_workers),
            f"{point.asked:.0f}",
            f"{point.answered:.0f}",
            "-" if point.p50_s is None else f"{point.p50_s * 1e3:.1f}",
            "-" if point.p99_s is None else f"{point.p99_s * 1e3:.1f}",
            f"{point.coordinator_cpu:.0%}",
            f"{point.generator_cpu:.0%}",
            "yes" if point.is_held else "no, but the generator was late" if point.generator_cpu > BUSY else "no",
        )
    print_table(console, table, first_numeric=0)
    refused, unsent, lost = (
        sum(getattr(point, name) for point in points) for name in ("num_refused", "num_unsent", "num_lost")
    )
    if refused or unsent or lost:
        say(console, f"{refused} requests refused, {unsent} frames not sent, {lost} processes declared dead")


def table_of(points: list[Point]) -> FigureTable:
    """A row for each rate that was held, because the figures of an overloaded coordinator say little."""
    columns = (
        Column("asked", "requests/s", 0),
        Column("P50", "ms", 1),
        Column("P99", "ms", 1),
        Column("CPU", "%", 0),
    )
    held = [point for point in points if point.is_held]
    best = {
        point.num_workers: max(candidate.asked for candidate in held if candidate.num_workers == point.num_workers)
        for point in held
    }
    rows = tuple(
        Row(
            f"{point.num_workers:,} workers"
            + (", the most that was held" if point.asked == best[point.num_workers] else ""),
            (
                Figure(point.asked, rounds=1),
                None if point.p50_s is None else Figure(1e3 * point.p50_s, rounds=1),
                None if point.p99_s is None else Figure(1e3 * point.p99_s, rounds=1),
                Figure(100 * point.coordinator_cpu, rounds=1),
            ),
        )
        for point in held
    )
    return FigureTable(TITLE, "workers", columns, rows)


def table_alone(points: list[AlonePoint]) -> FigureTable:
    columns = (Column("requests/s", decimals=0), Column("CPU", "%", 0))
    rows = tuple(
        Row(f"{point.num_workers:,} workers", (Figure(point.rate, rounds=1), Figure(100 * point.cpu_share, rounds=1)))
        for point in points
    )
    return FigureTable(ALONE_TITLE, "workers", columns, rows)


def table_waiting(reports_s: Mapping[int, float]) -> FigureTable:
    """The CPU seconds of a report, by the number of workers."""
    rows = tuple(
        Row(f"{count:,} workers", (Figure(1e3 * report_s, rounds=1),)) for count, report_s in reports_s.items()
    )
    return FigureTable(WAITING_TITLE, "workers", (Column("CPU", "ms", 3),), rows)


def show_alone(points: list[AlonePoint], console: Console) -> None:
    table = Table("workers", "requests/s", "CPU seconds a second")
    for point in points:
        table.add_row(str(point.num_workers), f"{point.rate:.0f}", f"{point.cpu_share:.2f}")
    print_table(console, table, first_numeric=0)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    waiting = 1 if arguments.waiting is None else arguments.waiting
    if min(arguments.gateways, arguments.shards, arguments.links or 1, waiting) < 1:
        raise BenchError("--gateways, --shards, --links and --waiting must be at least 1")
    if min(arguments.seconds, arguments.load_report_s or 1.0) <= 0.0:
        raise BenchError("--seconds and --load-report-s must be more than 0")
    if max(arguments.workers) + arguments.gateways > MAX_PEERS or min(arguments.workers) < arguments.shards:
        raise BenchError(f"--workers must be at least --shards, and with the gateways at most {MAX_PEERS}")
    console = Console()
    machine = this_machine()
    say(console, machine_line(machine))
    details: dict[str, Any] = {"shards": arguments.shards}
    if arguments.waiting is not None:
        reports_s = {count: report_cpu_s(count, arguments.waiting) for count in arguments.workers}
        table = table_waiting(reports_s)
        for count, report_s in reports_s.items():
            say(console, f"{count} workers, {arguments.waiting} requests wait: {1e3 * report_s:.3f} ms a report")
        details["waiting"] = {"requests": arguments.waiting, "report_cpu_s": reports_s}
    elif arguments.in_process:
        alone = [point for count in arguments.workers for point in measure_alone(count, arguments, console)]
        show_alone(alone, console)
        details["in_process"] = [asdict(point) for point in alone]
        table = table_alone(alone)
    else:
        points = [point for count in arguments.workers for point in measure(count, arguments, console)]
        show(points, console)
        details["points"] = [asdict(point) | {"is_held": point.is_held} for point in points]
        table = table_of(points)
    save_figures(arguments, [table], details, machine)
    return 0

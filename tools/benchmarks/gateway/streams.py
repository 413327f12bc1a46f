"""``tools/bench gateway``: how many events a second one core of a gateway writes, and how late they are.

The gateway is the real process, with workers that compute nothing. Beside it, in turn, hypercorn and starlette alone
yield the same events. First a slow pace shows what an event costs; then latencies are taken at half of the rate that
this allows, and events/s a core at 70 %, which leaves the rest of two cores to the workers and the reader. The CPU time
is that of the server's processes, with all of their threads. Two gateways share a port and the streams: on two cores
the figure shows whether an event costs them more, and not how much faster they are.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial

from rich.console import Console
from rich.table import Table

from tools.benchmarks.common.arguments import add_json, add_model, count, counts, positive
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.gateway.rig import Model, Server, bare_hypercorn, gateway_server, read_model, reader_of
from tools.benchmarks.gateway.sse_reader import Measured
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

TITLE = "Events that one core of a gateway streams"
_FIRST_RATE = 1000.0  # events/s, at which the first cost is taken
_HALF, _BUSY = 0.5, 0.7
_CALIBRATION_S = 1.5
_SETTLE_S = 0.5

Start = Callable[[Model, int], AbstractContextManager[Server]]
SERVERS: dict[str, Start] = {
    "gateway": gateway_server,
    "two gateways": partial(gateway_server, num_gateways=2),
    "bare hypercorn": bare_hypercorn,
}


@dataclass(frozen=True, slots=True)
class Point:
    """One server with one number of streams: at half load, and near its limit."""

    server: str
    num_streams: int
    half: Measured
    busy: Measured

    @property
    def events_per_core(self) -> float:
        return self.busy.num_events / self.busy.cpu_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--streams", type=counts, default=(16, 256, 1024), metavar="N,N", help="streams at once (16,256,1024)"
    )
    parser.add_argument("--batch", type=count, default=64, help="streams of one worker (%(default)s)")
    parser.add_argument("--rounds", type=count, default=3, help="rounds, in which the servers take turns (%(default)s)")
    parser.add_argument("--seconds", type=positive, default=4.0, help="length of each measurement (%(default)s)")
    add_model(parser)
    add_json(parser)


def measure(name: str, num_streams: int, model: Model, arguments: argparse.Namespace) -> Point:
    """Raises: BenchError."""
    with (
        SERVERS[name](model, max(1, num_streams // arguments.batch)) as server,
        reader_of(server, model) as reader,
    ):
        reader.open(num_streams)
        cost_s = 0.0
        for rate in (_FIRST_RATE, None):  # an event costs less at a higher rate, so the cost is taken twice
            server.pace(num_streams / (rate or _HALF / cost_s))
            reader.measure(_SETTLE_S)
            taken = reader.measure(_CALIBRATION_S)
            if not taken.num_events:
                raise BenchError(f"{name} sent no events to {num_streams} streams")
            cost_s = taken.cpu_s / taken.num_events
        measured = []
        for share in (_HALF, _BUSY):
            server.pace(num_streams * cost_s / share)
            reader.measure(_SETTLE_S)
            measured.append(reader.measure(arguments.seconds))
        reader.close()
        return Point(name, num_streams, *measured)


def tables(points: Sequence[Point], streams: Sequence[int]) -> FigureTable:
    columns = (
        Column("events/s a core", decimals=0),
        Column("over bare hypercorn", "x", 2),
        Column("P50 at half load", "ms", 2),
        Column("P99 at half load", "ms", 2),
    )
    rows = []
    for num in streams:
        of = {name: [p for p in points if (p.server, p.num_streams) == (name, num)] for name in SERVERS}
        for name, mine in of.items():
            pairs = zip(mine, of["bare hypercorn"], strict=True)
            ratios = [point.events_per_core / bare.events_per_core for point, bare in pairs]
            cells = (
                Figure.of([point.events_per_core for point in mine]),
                None if name == "bare hypercorn" else Figure.of(ratios),
                Figure.of([1000 * (point.half.p50_s or 0.0) for point in mine]),
                Figure.of([1000 * (point.half.p99_s or 0.0) for point in mine]),
            )
            rows.append(Row(f"{num} streams, {name}", cells))
    return FigureTable(TITLE, "streams and server", columns, tuple(rows))


def run(arguments: argparse.Namespace) -> int:
    console = Console()
    say(console, machine_line(this_machine()))
    model = read_model(arguments.model)
    points = []
    for number in range(arguments.rounds):
        for num_streams in arguments.streams:
            for name in SERVERS:
                with console.status(f"round {number + 1}: {num_streams} streams, {name}"):
                    points.append(measure(name, num_streams, model, arguments))
    _print(console, points)
    save_figures(arguments, [tables(points, arguments.streams)], {"points": [asdict(point) for point in points]})
    return 0


def _print(console: Console, points: Sequence[Point]) -> None:
    table = Table("streams", "server", "events/s a core", "events/s", "CPU, %", "reader, %", "P50, ms", "P99, ms")
    for point in points:
        busy, half = point.busy, point.half
        table.add_row(
            str(point.num_streams),
            point.server,
            f"{point.events_per_core:,.0f}",
            f"{busy.num_events / busy.seconds:,.0f}",
            f"{100 * busy.cpu_s / busy.seconds:.0f}",
            f"{100 * busy.reader_cpu_s / busy.seconds:.0f}",
            f"{1000 * (half.p50_s or 0.0):.2f}",
            f"{1000 * (half.p99_s or 0.0):.2f}",
        )
    print_table(console, table, 2)

"""``tools/bench dashboard``: what open pages of ``/dashboard`` cost the gateway that serves them.

The gateway is the real process, and another process stands for its workers, whose requests get a token a second. The
gateway's CPU time is taken in turn without and with pages.
"""

import argparse
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from selectors import EVENT_READ, DefaultSelector
from typing import Final

from rich.console import Console

from tools.benchmarks.common.arguments import add_json, add_model, count, counts, positive
from tools.benchmarks.common.console import say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.common.processes import cpu_s
from tools.benchmarks.gateway.rig import Model, gateway_server, read_model, reader_of
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

TITLE = "Open pages of the dashboard"
_STEP_S: Final = 1.0
_TIMEOUT_S: Final = 30.0
_READ_BYTES: Final = 1 << 20
_REQUEST: Final = b"GET /dashboard/events HTTP/1.1\r\nhost: localhost\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Point:
    """What so many pages cost with so many workers and requests, a value for each round: the gateway's share of a core
    with and without them, and what the pages got.
    """

    num_workers: int
    num_requests: int
    num_pages: int
    cpu: tuple[float, ...]
    idle_cpu: tuple[float, ...]
    bytes_per_page_s: tuple[float, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=counts, default=(8, 64), metavar="N,N", help="numbers of workers (8,64)")
    parser.add_argument("--per-worker", type=count, default=4, help="open requests of each worker (%(default)s)")
    parser.add_argument("--pages", type=counts, default=(1, 10), metavar="N,N", help="numbers of open pages (1,10)")
    parser.add_argument("--rounds", type=count, default=5, help="rounds, each without and with pages (%(default)s)")
    parser.add_argument("--seconds", type=positive, default=5.0, help="length of a window (%(default)s)")
    add_model(parser)
    add_json(parser)


class _Pages:
    """Clients that read their streams as fast as they come, on a thread."""

    def __init__(self, port: int, num_pages: int) -> None:
        self.num_bytes = 0
        self._selector = DefaultSelector()
        self._is_over = False
        for _ in range(num_pages):
            connection = socket.create_connection(("127.0.0.1", port), _TIMEOUT_S)
            connection.sendall(_REQUEST)
            if not connection.recv(_READ_BYTES).startswith(b"HTTP/1.1 200"):
                raise BenchError("the gateway refuses a page")
            self._selector.register(connection, EVENT_READ)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._is_over:
            for key, _ in self._selector.select(0.2):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                self.num_bytes += len(connection.recv(_READ_BYTES))

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()


@contextmanager
def _pages(port: int, num_pages: int) -> Iterator[_Pages]:
    pages = _Pages(port, num_pages)
    try:
        yield pages
    finally:
        pages.close()


def measure(model: Model, num_workers: int, arguments: argparse.Namespace, console: Console) -> list[Point]:
    """All rounds with so many workers. Raises: BenchError."""
    num_requests = num_workers * arguments.per_worker
    with ExitStack() as stack:
        server = stack.enter_context(gateway_server(model, num_workers))
        stack.enter_context(reader_of(server, model)).open(num_requests)
        server.pace(_STEP_S)
        process_id, seconds = server.process_ids[0], arguments.seconds
        shares: dict[int, list[float]] = {num_pages: [] for num_pages in arguments.pages}
        idle: dict[int, list[float]] = {num_pages: [] for num_pages in arguments.pages}
        sent: dict[int, list[float]] = {num_pages: [] for num_pages in arguments.pages}
        for number in range(arguments.rounds):
            for num_pages in arguments.pages:
                with console.status(f"{num_workers} workers, {num_pages} pages, round {number + 1}"):
                    idle[num_pages].append(_share(process_id, seconds))
                    with _pages(server.port, num_pages) as pages:
                        time.sleep(1.0)  # the history is sent at first
                        before = pages.num_bytes
                        shares[num_pages].append(_share(process_id, seconds))
                        sent[num_pages].append((pages.num_bytes - before) / num_pages / seconds)
                    time.sleep(1.0)
    return [
        Point(
            num_workers,
            num_requests,
            num_pages,
            tuple(shares[num_pages]),
            tuple(idle[num_pages]),
            tuple(sent[num_pages]),
        )
        for num_pages in arguments.pages
    ]


def _share(process_id: int, seconds: float) -> float:
    """The process's CPU share of a core during the next ``seconds``."""
    began_s, began_cpu_s = time.monotonic(), cpu_s(process_id)
    time.sleep(seconds)
    return (cpu_s(process_id) - began_cpu_s) / (time.monotonic() - began_s)


def table_of(points: Sequence[Point]) -> FigureTable:
    columns = (
        Column("the gateway's core with pages", "%", 2),
        Column("the gateway's core without pages", "%", 2),
        Column("a page gets", "KiB/s", 1),
    )
    rows = tuple(
        Row(
            f"{point.num_workers:,} workers, {point.num_requests:,} requests, {_pages_text(point.num_pages)}",
            (
                Figure.of([100 * share for share in point.cpu]),
                Figure.of([100 * share for share in point.idle_cpu]),
                Figure.of([num_bytes / 1024 for num_bytes in point.bytes_per_page_s]),
            ),
        )
        for point in points
    )
    return FigureTable(TITLE, "open", columns, rows)


def _pages_text(number: int) -> str:
    return "1 page" if number == 1 else f"{number} pages"


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    console = Console()
    machine = this_machine()
    say(console, machine_line(machine))
    model = read_model(arguments.model)
    points = [point for num_workers in arguments.workers for point in measure(model, num_workers, arguments, console)]
    table = table_of(points)
    for row in table.rows:
        shown = zip(table.columns, row.cells, strict=True)
        texts = [f"{column.name} {cell.median:.2f} {column.unit}" for column, cell in shown if cell is not None]
        say(console, f"{row.name}: {', '.join(texts)}")
    save_figures(arguments, [table], {"points": [asdict(point) for point in points]}, machine)
    return 0

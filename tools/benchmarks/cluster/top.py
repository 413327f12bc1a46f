"""``tools/bench top``: what the console's live view of many workers costs the coordinator, and how fast it is drawn.

The coordinator is the real process, and another process stands for its workers, as in ``tools/bench coordinator``. A
console asks ten times a second instead of once, because one answer costs too little to be told from noise. The cost of
an answer is the CPU time that the coordinator takes more than in the windows between, divided by the answers.
"""

import argparse
import io
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Final

from rich.console import Console

from actorserve.actors.membership import MAX_PEERS
from actorserve.console.outcome import as_objects
from actorserve.console.session import Session
from actorserve.console.top import TokenRates, picture
from actorserve.wire.console import ConsoleClient, console_address
from tools.benchmarks.cluster.coordinator import Shard
from tools.benchmarks.common.arguments import add_json, count, counts, positive
from tools.benchmarks.common.console import say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.common.processes import cpu_s
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

TITLE = "The console's live view"
REDRAWS_PER_S: Final = 1.0  # of a console that a person watches
_ASKED_PER_S: Final = 10.0
_SIZE: Final = (160, 60)  # characters and lines of the terminal
_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Point:
    """What one number of workers costs, a value for each round. A redraw lasts from the question to the last
    character.
    """

    num_workers: int
    answer_cpu_s: tuple[float, ...]
    redraw_s: tuple[float, ...]  # the median of the round
    slowest_s: tuple[float, ...]
    idle_cpu: tuple[float, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=counts, default=(100, 1000), metavar="N,N", help="numbers of workers (100,1000)"
    )
    parser.add_argument("--gateways", type=count, default=4, help="gateways (%(default)s)")
    parser.add_argument("--rounds", type=count, default=5, help="rounds, each with and without a console (%(default)s)")
    parser.add_argument("--seconds", type=positive, default=3.0, help="length of a window (%(default)s)")
    parser.set_defaults(links=None, load_report_s=None)
    add_json(parser)


def measure(num_workers: int, arguments: argparse.Namespace, console: Console) -> Point:
    """All rounds with so many workers. Raises: BenchError if they do not connect, or no answer comes."""
    with ExitStack() as stack:
        shard = stack.enter_context(Shard(num_workers, arguments, None))
        with console.status(f"{num_workers} workers meet the coordinator"):
            shard.wait_ready()
        client = ConsoleClient(console_address(shard.folder))
        stack.callback(client.close)
        viewer = _Viewer(Session(client, _TIMEOUT_S), num_workers)
        with console.status("until every worker has reported"):
            viewer.wait_for_all()
        answers: list[float] = []
        redraws: list[float] = []
        slowest: list[float] = []
        idle: list[float] = []
        for _ in range(arguments.rounds):
            with console.status(f"{num_workers} workers, round {len(answers) + 1}"):
                idle_share = _window(shard.coordinator_id, arguments.seconds, None)[0]
                share, num_answers = _window(shard.coordinator_id, arguments.seconds, viewer)
            answers.append(max(0.0, share - idle_share) * arguments.seconds / num_answers)
            redraws.append(median(viewer.redraws_s))
            slowest.append(max(viewer.redraws_s))
            idle.append(idle_share)
    return Point(num_workers, tuple(answers), tuple(redraws), tuple(slowest), tuple(idle))


class _Viewer:
    """A console that draws to memory."""

    def __init__(self, session: Session, num_workers: int) -> None:
        self._session = session
        self._num_workers = num_workers
        self._rates = TokenRates()
        self._screen = Console(
            file=io.StringIO(), force_terminal=True, width=_SIZE[0], height=_SIZE[1], color_system="standard"
        )
        self.redraws_s: list[float] = []  # of the current window

    def wait_for_all(self) -> None:
        """Raises: BenchError if not all workers report in time."""
        until_s = time.monotonic() + 60.0
        while time.monotonic() < until_s:
            answer = self._session.read("top")
            if answer is not None and len(as_objects(answer)) == self._num_workers:
                return
            time.sleep(0.1)
        raise BenchError(f"fewer than {self._num_workers} workers have reported")

    def redraw(self) -> None:
        """Raises: BenchError."""
        began_s = time.perf_counter()
        answer = self._session.read("top")
        if answer is None:
            raise BenchError(f"no answer in {_TIMEOUT_S:g} s")
        self._screen.print(picture(answer, self._rates, time.monotonic(), _SIZE[1], "tokens_per_s"))
        self.redraws_s.append(time.perf_counter() - began_s)


def _window(process_id: int, seconds: float, viewer: _Viewer | None) -> tuple[float, int]:
    """The coordinator's CPU share of a core in a window, and how many answers it gave."""
    began_s, began_cpu_s = time.monotonic(), cpu_s(process_id)
    num_answers = 0
    if viewer is not None:
        viewer.redraws_s.clear()
    while (passed_s := time.monotonic() - began_s) < seconds:
        if viewer is not None:
            viewer.redraw()
            num_answers += 1
            passed_s = time.monotonic() - began_s
        time.sleep(max(0.0, min(seconds, (int(passed_s * _ASKED_PER_S) + 1) / _ASKED_PER_S) - passed_s))
    return (cpu_s(process_id) - began_cpu_s) / (time.monotonic() - began_s), max(1, num_answers)


def table_of(points: list[Point]) -> FigureTable:
    columns = (
        Column("the coordinator's core at one redraw a second", "%", 2),
        Column("redraw, median", "ms", 1),
        Column("slowest redraw", "ms", 1),
        Column("the coordinator's core without a console", "%", 1),
    )
    rows = tuple(
        Row(
            f"{point.num_workers:,} workers",
            (
                Figure.of([100 * REDRAWS_PER_S * answer_s for answer_s in point.answer_cpu_s]),
                Figure.of([1e3 * redraw_s for redraw_s in point.redraw_s]),
                Figure.of([1e3 * slowest_s for slowest_s in point.slowest_s]),
                Figure.of([100 * share for share in point.idle_cpu]),
            ),
        )
        for point in points
    )
    return FigureTable(TITLE, "workers", columns, rows)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    if max(arguments.workers) + arguments.gateways > MAX_PEERS:
        raise BenchError(f"--workers and the gateways must be at most {MAX_PEERS}")
    console = Console()
    machine = this_machine()
    say(console, machine_line(machine))
    points = [measure(num_workers, arguments, console) for num_workers in arguments.workers]
    table = table_of(points)
    for row in table.rows:
        shown = zip(table.columns, row.cells, strict=True)
        texts = [f"{column.name} {cell.median:.2f} {column.unit}" for column, cell in shown if cell is not None]
        say(console, f"{row.name}: {', '.join(texts)}")
    save_figures(arguments, [table], {"points": [asdict(point) for point in points]}, machine)
    return 0

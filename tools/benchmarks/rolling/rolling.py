"""``tools/bench rolling``: what clients see while all processes of a server are restarted, one after the other.

Clients stream all the time. In each round, one worker after the other is first drained, and the survivors have all
streams: that is what a restart must cost. Then an operator restarts each worker, the coordinator and each gateway. A
process that loads takes the cores that the others need here, so the ITL is told without the gaps between tokens that
overlap with loading, and with all of them. Ratios are those to the survivors and to all workers, undisturbed, of the
same round. On few cores the survivors' ITL can be the lower one, because workers take the cores from each other.
"""

import argparse
import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial

from rich.console import Console

from actorserve.console.outcome import as_objects
from actorserve.console.session import Session
from actorserve.sim.statistics import percentile
from actorserve.wire.console import ConsoleClient, console_address
from tools.benchmarks.common.arguments import add_json, add_model, count, positive
from tools.benchmarks.common.children import socket_folder
from tools.benchmarks.common.console import print_figures, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.rolling.server import RollingServer
from tools.benchmarks.rolling.streams import Seen, Streams
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

TITLE = "Clients of a server whose processes are restarted"
_UNDISTURBED = "all workers"
_SURVIVORS = "survivors alone"
_START_S = 120.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Phase:
    """What the clients saw in some time. ``gaps_s`` leaves out what overlaps with ``loading_s`` of the time;
    ``all_gaps_s`` leaves out nothing.
    """

    name: str
    round: int
    duration_s: float
    loading_s: float
    num_answers: int
    num_failed: int
    num_different: int
    gaps_s: tuple[float, ...]
    all_gaps_s: tuple[float, ...]

    @property
    def p99_ms(self) -> float:
        return 1e3 * percentile(self.gaps_s, 99.0)

    @property
    def p99_with_loading_ms(self) -> float:
        return 1e3 * percentile(self.all_gaps_s, 99.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=count, default=16, help="streams at any time (%(default)s)")
    parser.add_argument("--tokens", type=count, default=96, help="tokens of an answer (%(default)s)")
    parser.add_argument("--workers", type=count, default=2, help="workers, at least 2 (%(default)s)")
    parser.add_argument("--gateways", type=count, default=2, help="gateways, at least 2 (%(default)s)")
    parser.add_argument("--seconds", type=positive, default=20.0, help="length of undisturbed windows (%(default)s)")
    parser.add_argument("--rounds", type=count, default=1, help="medians are shown (%(default)s)")
    parser.add_argument("--engine", choices=("torch", "fake"), default="torch", help="fake: no model computes")
    add_model(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: ActorserveError, KeyboardInterrupt."""
    if min(arguments.workers, arguments.gateways) < 2:
        raise BenchError("--workers and --gateways must be at least 2, because the others serve meanwhile")
    console = Console()
    machine = this_machine()
    say(console, machine_line(machine))
    with ExitStack() as stack:
        folder = stack.enter_context(socket_folder())
        server = stack.enter_context(RollingServer(folder, arguments))
        client = ConsoleClient(console_address(folder))
        stack.callback(client.close)
        with console.status("") as status:
            server.wait_ready(_START_S)
            bench = _Bench(arguments, server, Session(client, 1.0), status.update)
            asyncio.run(bench.run())
    table = table_of(bench.phases)
    print_figures(console, table)
    for failure in bench.failures[:5]:
        say(console, failure)
    details = {
        "phases": [
            asdict(phase) | {"gaps_s": len(phase.gaps_s), "all_gaps_s": len(phase.all_gaps_s)} for phase in bench.phases
        ],
        "failures": bench.failures,
        "model": arguments.model,
    }
    save_figures(arguments, [table], details, machine)
    return 0


class _Bench:
    """All phases, once the server is ready."""

    def __init__(
        self, arguments: argparse.Namespace, server: RollingServer, session: Session, tell: Callable[[str], None]
    ) -> None:
        self.phases: list[Phase] = []
        self.failures: list[str] = []
        self._arguments = arguments
        self._server = server
        self._session = session
        self._tell = tell
        self._streams = Streams(server.url, arguments.streams, arguments.tokens)
        self._workers = [f"worker-{number}" for number in range(arguments.workers)]

    async def run(self) -> None:
        """Raises: BenchError."""
        self._tell("all answers, undisturbed")
        await self._until(
            lambda: set(self._states().values()) == {"open"} and len(self._states()) == len(self._workers)
        )
        await self._streams.learn()
        async with self._streams.running():
            await asyncio.sleep(self._arguments.seconds / 4)
            for number in range(self._arguments.rounds):
                await self._phase(number, _UNDISTURBED, lambda loading: asyncio.sleep(self._arguments.seconds))
                await self._phase(number, _SURVIVORS, self._survive)
                await self._phase(number, "each worker restarts", self._restart_workers)
                await self._phase(number, "the coordinator restarts", self._restart_coordinator)
                await self._phase(number, "each gateway restarts", self._restart_gateways)
        self.failures = self._streams.seen.failures

    async def _phase(self, number: int, name: str, act: "Callable[[_Loading], Awaitable[None]]") -> None:
        self._tell(f"round {number + 1}: {name}")
        seen, loading = self._streams.seen, _Loading()
        began_s = time.monotonic()
        before = (seen.num_answers, len(seen.failures), seen.num_different)
        await act(loading)
        ended_s = time.monotonic()
        after = (seen.num_answers, len(seen.failures), seen.num_different)
        answers, failed, different = (new - old for new, old in zip(after, before, strict=True))
        gaps, all_gaps = _gaps(seen, began_s, ended_s, loading), _gaps(seen, began_s, ended_s, _Loading())
        if len(gaps) < 100:
            raise BenchError(f"{name}: only {len(gaps)} gaps between tokens were seen")
        self.phases.append(
            Phase(name, number, ended_s - began_s, loading.total_s, answers, failed, different, gaps, all_gaps)
        )

    async def _survive(self, loading: "_Loading") -> None:
        """Each worker in turn has nothing to do. The moves away from it and back are not counted."""
        for name in self._workers:
            began_s = time.monotonic()
            self._order("drain", name)
            await self._until(partial(self._session.is_drained, name))
            loading.spans.append((began_s, time.monotonic()))
            await asyncio.sleep(self._arguments.seconds / len(self._workers))
            began_s = time.monotonic()
            self._order("uncordon", name)
            await asyncio.sleep(self._arguments.seconds / 8)  # the streams spread again
            loading.spans.append((began_s, time.monotonic()))

    async def _restart_workers(self, loading: "_Loading") -> None:
        for name in self._workers:
            first = self._server.pid(name)
            self._order("restart", name)
            await self._until(partial(self._is_other, name, first))
            await self._load(loading, partial(self._is_open, name))

    async def _restart_coordinator(self, loading: "_Loading") -> None:
        first = self._server.pid("coordinator")
        self._server.signal("coordinator", signal.SIGTERM)
        await self._until(partial(self._is_other, "coordinator", first))
        await self._load(loading, self._all_are_open)

    async def _restart_gateways(self, loading: "_Loading") -> None:
        for number in range(self._arguments.gateways):
            name = f"gateway-{number}"
            first = self._server.pid(name)
            self._server.signal(name, signal.SIGTERM)
            await self._until(partial(self._is_other, name, first))
            await self._load(loading, partial(self._server.listens, name))

    async def _load(self, loading: "_Loading", is_over: Callable[[], bool]) -> None:
        began_s = time.monotonic()
        await self._until(is_over)
        loading.spans.append((began_s, time.monotonic()))
        await asyncio.sleep(self._arguments.seconds / 4)

    def _order(self, verb: str, name: str) -> None:
        """Raises: BenchError."""
        answer = self._session.read(verb, name)
        if answer is None or answer.outcome != "done":
            raise BenchError(f"{verb} {name}: {'no answer' if answer is None else answer.text}")

    def _states(self) -> dict[str, str]:
        """The workers' states; none while no coordinator answers."""
        answer = self._session.read("workers")
        return {} if answer is None else {row["worker"]: row["state"] for row in as_objects(answer)}

    def _all_are_open(self) -> bool:
        return sorted(self._states().items()) == [(name, "open") for name in self._workers]

    def _is_open(self, name: str) -> bool:
        return self._states().get(name) == "open"

    def _is_other(self, name: str, first: int | None) -> bool:
        """Whether the process has ended."""
        return self._server.pid(name) != first

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Raises: BenchError."""
        until_s = time.monotonic() + _START_S
        while not await asyncio.to_thread(is_so):
            if time.monotonic() > until_s:
                raise BenchError("a process did not end or start in time")
            await asyncio.sleep(_POLL_S)


class _Loading:
    """The spans of time in which a process loads, in seconds."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    @property
    def total_s(self) -> float:
        return sum(end_s - begin_s for begin_s, end_s in self.spans)

    def overlaps(self, gap: tuple[float, float]) -> bool:
        return any(gap[1] > begin_s and gap[0] < end_s for begin_s, end_s in self.spans)


def _gaps(seen: Seen, began_s: float, ended_s: float, loading: _Loading) -> tuple[float, ...]:
    """The gaps that end in this time and overlap with no loading, the shortest first."""
    return tuple(
        sorted(
            end - begin for begin, end in seen.gaps if began_s <= end <= ended_s and not loading.overlaps((begin, end))
        )
    )


def table_of(phases: list[Phase]) -> FigureTable:
    """A row for each kind of phase. The survivors' moves, which are their loading, do not count for them."""
    survivors = {phase.round: phase.p99_ms for phase in phases if phase.name == _SURVIVORS}
    undisturbed = {phase.round: phase.p99_ms for phase in phases if phase.name == _UNDISTURBED}
    columns = (
        Column("answers"),
        Column("failed requests"),
        Column("answers with other tokens"),
        Column("median ITL", "ms"),
        Column("P99 ITL", "ms"),
        Column("P99 over the survivors'", "x", 2),
        Column("P99 over all workers'", "x", 2),
        Column("with loading, P99 over the survivors'", "x", 2),
        Column("longest gap", "ms"),
    )
    rows = []
    for name in dict.fromkeys(phase.name for phase in phases):
        same = [phase for phase in phases if phase.name == name]
        values = (
            [float(phase.num_answers) for phase in same],
            [float(phase.num_failed) for phase in same],
            [float(phase.num_different) for phase in same],
            [1e3 * percentile(phase.gaps_s, 50.0) for phase in same],
            [phase.p99_ms for phase in same],
            [phase.p99_ms / survivors[phase.round] for phase in same],
            [phase.p99_ms / undisturbed[phase.round] for phase in same],
            [phase.p99_with_loading_ms / survivors[phase.round] for phase in same],
            [1e3 * phase.gaps_s[-1] for phase in same],
        )
        rows.append(Row(name, tuple(Figure.of(value) for value in values)))
    return FigureTable(TITLE, "meanwhile", columns, tuple(rows))

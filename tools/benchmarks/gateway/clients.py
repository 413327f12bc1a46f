"""``tools/bench clients``: what clients that only cost do to others, and how much memory an idle stream takes.

Some neighbours ask for short answers all the time. Their latencies are taken without and with a crowd, in turn: idle
connections, streams that are never read, and 600 kB prompts that are refused. The workers compute nothing.
"""

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from actorserve.sim.statistics import percentile
from tools.benchmarks.common.arguments import add_json, add_model, count, positive
from tools.benchmarks.common.children import running
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.common.processes import memory_of
from tools.benchmarks.gateway import crowd
from tools.benchmarks.gateway.crowd import Kind, Options
from tools.benchmarks.gateway.rig import Model, Server, gateway_server, read_model
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

TITLE = "What crowds do to the latency of others"
MEMORY_TITLE = "Memory of the gateway"
_STEP_S = 0.05
_NO_STEPS_S = 1000.0
_ANSWER_TOKENS = 4
_CONTEXT_TOKENS = 8192
_LONG_PROMPT, _LONG_REPEATS = "the quick brown fox jumps ", 23_000
_SPARE_FILES = 200
_SETTLE_S = 3.0
_FILL_S, _FILL_STEP_S = 10.0, 0.005


@dataclass(frozen=True, slots=True)
class Point:
    """The neighbours' latencies without and with one crowd, in seconds."""

    crowd: str
    alone_p50_s: float
    alone_p99_s: float
    p50_s: float
    p99_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--connections", type=count, default=10_000, help="idle connections (%(default)s)")
    parser.add_argument("--streams", type=count, default=1000, help="idle streams (%(default)s)")
    parser.add_argument("--not-reading", type=count, default=200, help="clients that never read (%(default)s)")
    parser.add_argument("--refused", type=count, default=4, help="clients of 600 kB prompts (%(default)s)")
    parser.add_argument("--neighbours", type=count, default=4, help="clients that are measured (%(default)s)")
    parser.add_argument("--rounds", type=count, default=3, help="rounds (%(default)s)")
    parser.add_argument("--seconds", type=positive, default=10.0, help="length of each measurement (%(default)s)")
    add_model(parser)
    add_json(parser)


@contextmanager
def crowd_of(server: Server, kind: Kind, num: int, body: dict[str, Any]) -> Iterator[None]:
    """Raises: BenchError, if the clients cannot connect."""
    options = json.dumps(asdict(Options(server.port, kind, num, body, _LONG_REPEATS if kind is Kind.REFUSED else 1)))
    with running([sys.executable, "-P", "-m", crowd.__name__, options]) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise BenchError(f"{num} clients ({kind}) could not connect")
        yield


def latencies(server: Server, model: Model, num: int, seconds: float) -> list[float]:
    """The sorted latencies of ``num`` neighbours' requests, in seconds."""

    async def ask(client: httpx.AsyncClient, until_s: float, taken_s: list[float]) -> None:
        body = {"model": model.name, "prompt": "Once upon a time", "max_tokens": _ANSWER_TOKENS}
        while time.monotonic() < until_s:
            began_s = time.perf_counter()
            (await client.post("/v1/completions", json=body)).raise_for_status()
            taken_s.append(time.perf_counter() - began_s)

    async def ask_all() -> list[float]:
        taken_s: list[float] = []
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=60.0, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(num):
                group.create_task(ask(client, time.monotonic() + seconds, taken_s))
        return sorted(taken_s)

    return asyncio.run(ask_all())


def measure(server: Server, model: Model, arguments: argparse.Namespace, console: Console) -> list[Point]:
    """One round. Raises: BenchError."""
    stream, refused = _streaming(model), {"model": model.name, "prompt": _LONG_PROMPT}
    points = []
    for name, kind, num, body in (
        (f"{arguments.connections:,} idle connections", Kind.IDLE, arguments.connections, {}),
        (f"{arguments.not_reading:,} clients that never read", Kind.NOT_READING, arguments.not_reading, stream),
        (f"{arguments.refused:,} clients of 600 kB prompts", Kind.REFUSED, arguments.refused, refused),
    ):
        with console.status(name):
            alone = latencies(server, model, arguments.neighbours, arguments.seconds)
            with crowd_of(server, kind, num, body):
                if kind is Kind.NOT_READING:  # fill what lies between the gateway and these clients
                    server.pace(_FILL_STEP_S)
                    time.sleep(_FILL_S)
                    server.pace(_STEP_S)
                time.sleep(_SETTLE_S)
                taken = latencies(server, model, arguments.neighbours, arguments.seconds)
            time.sleep(_SETTLE_S)  # until the gateway has noticed that the crowd has gone, which may be 10,000 clients
        points.append(
            Point(name, percentile(alone, 50), percentile(alone, 99), percentile(taken, 50), percentile(taken, 99))
        )
    return points


def stream_memory(server: Server, model: Model, num: int) -> float:
    """The memory of the gateway for each of ``num`` streams that get no tokens, in bytes. Raises: BenchError."""
    before = memory_of(server.process_ids).rss_bytes
    with crowd_of(server, Kind.STREAMING, num, _streaming(model)):
        server.pace(_NO_STEPS_S)
        time.sleep(_SETTLE_S)
        return (memory_of(server.process_ids).rss_bytes - before) / num


def _streaming(model: Model) -> dict[str, Any]:
    return {"model": model.name, "prompt": "x", "max_tokens": 8000, "stream": True, "ignore_eos": True}


def run(arguments: argparse.Namespace) -> int:
    console = Console()
    say(console, machine_line(this_machine()))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if arguments.connections + _SPARE_FILES > hard:
        raise BenchError(f"a process may open {hard} files; give fewer --connections, or raise ulimit -Hn")
    model = read_model(arguments.model)
    points: list[Point] = []
    memory: list[float] = []
    for _ in range(arguments.rounds):
        with gateway_server(model, 1, context_tokens=_CONTEXT_TOKENS) as server:
            server.pace(_STEP_S)
            latencies(server, model, arguments.neighbours, 1.0)  # warms up
            points += measure(server, model, arguments, console)
        with gateway_server(model, 1, context_tokens=_CONTEXT_TOKENS) as server:
            memory.append(stream_memory(server, model, arguments.streams))
    _print(console, points)
    say(console, f"memory per idle stream: {memory[-1] / 1024:.1f} KiB")
    save_figures(arguments, tables(points, memory), {"points": [asdict(point) for point in points], "memory": memory})
    return 0


def tables(points: Sequence[Point], memory: Sequence[float]) -> list[FigureTable]:
    columns = (
        Column("P50 without", "ms", 1),
        Column("P50 with", "ms", 1),
        Column("P99 without", "ms", 1),
        Column("P99 with", "ms", 1),
        Column("P99, with / without", "x", 2),
    )
    rows = []
    for name in dict.fromkeys(point.crowd for point in points):
        mine = [point for point in points if point.crowd == name]
        cells = (
            Figure.of([1000 * point.alone_p50_s for point in mine]),
            Figure.of([1000 * point.p50_s for point in mine]),
            Figure.of([1000 * point.alone_p99_s for point in mine]),
            Figure.of([1000 * point.p99_s for point in mine]),
            Figure.of([point.p99_s / point.alone_p99_s for point in mine]),
        )
        rows.append(Row(name, cells))
    idle = Row("an idle stream", (Figure.of([size / 1024 for size in memory]),))
    return [
        FigureTable(TITLE, "crowd", columns, tuple(rows)),
        FigureTable(MEMORY_TITLE, "what", (Column("memory", "KiB", 1),), (idle,)),
    ]


def _print(console: Console, points: Sequence[Point]) -> None:
    table = Table("crowd", "P50 without, ms", "P50 with", "P99 without", "P99 with")
    for point in points:
        numbers = (point.alone_p50_s, point.p50_s, point.alone_p99_s, point.p99_s)
        table.add_row(point.crowd, *(f"{1000 * number:.1f}" for number in numbers))
    print_table(console, table)

"""``tools/bench failover``: the coordinator that serves is killed under streams; how soon another one places requests.

Two shapes run one after the other, with two workers each: two hosts on loopback (tcp) with a coordinator each, and one
host whose supervisor starts its only coordinator again. Streams generate, and short requests arrive all the time. By
the gateway's journal, one time lasts from SIGKILL until a worker starts a request that had no place at that moment,
whether another coordinator or the gateway itself has placed it, and one until the first placement of another
coordinator. The short requests arrive every ``PROBE_S``, and so both are up to that much too long. Streams must get the
tokens that they get without a death, or the measurement fails. Their inter-token latency (ITL) in the seconds after the
deaths is compared with that in as many seconds before.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from statistics import median
from typing import Final

import httpx
from rich.console import Console

from actorserve.core.messages import Placed, Started
from actorserve.wire.journal import Entry
from tools.benchmarks.common.arguments import add_json, count, positive
from tools.benchmarks.common.children import running, socket_folder
from tools.benchmarks.common.console import say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.common.journals import entries_of
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

TITLE = "A killed coordinator"
SHAPES: Final = {"two-hosts": "two hosts, the next one serves", "one-host": "one host, it starts again"}
PROBE_S: Final = 0.1
_NUM_WORKERS: Final = 2
_READY_S: Final = 300.0
_TAKEOVER_S: Final = 30.0
_POLL_S: Final = 0.02
_SETTLE_S: Final = 1.0  # after a takeover, for the first placement
_FOLLOWS: Final = re.compile(r"gateway-0 follows (\S+) in term (\d+)")
_STANDS_BY: Final = re.compile(r"coordinator stands by: (\S+) serves")
_CONFIG: Final = """
[http]
port = {port}
[model]
path = "{model}"
[workers]
engine = "{engine}"
count = {num_workers}
threads = 1
kv_cache_bytes = 268435456
host_kv_bytes = 0
[cluster]
journal_dir = "{journals}"
[supervision]
window_s = 0.1  # so that the pause before a restart is that after a single death
"""
_CLUSTER: Final = """
id = "bench"
coordinators = ["alpha", "beta"]
coordinator_port = {port}
kv_port = {kv_port}
[[host]]
name = "alpha"
address = "127.0.0.1"
workers = 1
[[host]]
name = "beta"
address = "127.0.0.2"
gateways = 1
workers = 1
"""


@dataclass(frozen=True, slots=True)
class Death:
    """One kill: until a request was placed, until another coordinator placed one, and the P99 of ITL before and
    after.
    """

    placed_again_s: float
    by_coordinator_s: float
    itl_before_s: float
    itl_after_s: float


@dataclass(slots=True)
class _Cluster:
    """A running cluster: its supervisors, and its gateway's URL, name in journals, and log. ``entries``: what the
    gateway's journal says of placed and started requests; known after the end.
    """

    supervisors: dict[str, int]  # host (empty for one host) -> process id
    url: str
    journals: Path
    gateway: str
    log: Path
    entries: list[Entry] = field(default_factory=list)

    def following(self) -> tuple[str, int]:
        """The coordinator that the gateway follows, and its term; empty and 0 for none yet."""
        found = _FOLLOWS.findall(self.log.read_text(encoding="utf-8", errors="replace"))
        return (found[-1][0], int(found[-1][1])) if found else ("", 0)

    def num_standbys(self, host: str) -> int:
        """How often a coordinator on ``host`` has stood by; with one host, how often it began to serve."""
        if not host:
            return self.following()[1]
        return len(_STANDS_BY.findall(self.log.with_name(f"{host}.log").read_text(encoding="utf-8", errors="replace")))

    def kill_coordinator(self) -> float:
        """kill -9 of the one that serves. Returns when. Raises: BenchError if it does not run."""
        name, _ = self.following()
        pid = _child(self.supervisors[name.rpartition("/")[0]], name)
        at_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return at_s


@dataclass(slots=True)
class _Streams:
    """The times at which streams got tokens: the gaps, with the moment at which each one ended."""

    gaps: list[tuple[float, float]] = field(default_factory=list)
    num_answers: int = 0

    def p99_s(self, begin_s: float, end_s: float) -> float:
        """Raises: BenchError if the streams got nothing then."""
        gaps = sorted(gap_s for at_s, gap_s in self.gaps if begin_s <= at_s < end_s)
        if not gaps:
            raise BenchError(f"no stream got a token in {end_s - begin_s:g} s")
        return gaps[ceil(0.99 * len(gaps)) - 1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="default", help="the model (%(default)s)")
    parser.add_argument("--engine", choices=("torch", "fake"), default="torch", help="the engine (%(default)s)")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES), help="what to measure")
    parser.add_argument("--kills", type=count, default=10, help="deaths in each shape (%(default)s)")
    parser.add_argument("--streams", type=count, default=16, help="streams (%(default)s)")
    parser.add_argument("--tokens", type=count, default=200, help="tokens of an answer (%(default)s)")
    parser.add_argument("--seconds", type=positive, default=3.0, help="of ITL before and after (%(default)s)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    console, machine = Console(), this_machine()
    say(console, machine_line(machine))
    load_before = os.getloadavg()[0]
    deaths: dict[str, list[Death]] = {}
    for shape in arguments.shapes:
        with console.status(f"{SHAPES[shape]}: {arguments.kills} kills"), _running(shape, arguments) as cluster:
            streams, killed = asyncio.run(_measure(cluster, arguments))
        deaths[shape] = _deaths(cluster, streams, killed, arguments.seconds)
        times = [death.placed_again_s for death in deaths[shape]]
        ratios = [death.itl_after_s / death.itl_before_s for death in deaths[shape]]
        say(
            console,
            f"{SHAPES[shape]}: placed again after {median(times):.2f} s ({min(times):.2f} to {max(times):.2f}), by a "
            f"coordinator after {median(death.by_coordinator_s for death in deaths[shape]):.2f} s; "
            f"P99 ITL {median(ratios):.2f}x; {streams.num_answers} answers, all as without a death",
        )
    details = {
        "load_average": [load_before, os.getloadavg()[0]],
        "deaths": {shape: [asdict(death) for death in found] for shape, found in deaths.items()},
    }
    save_figures(arguments, [table_of(deaths)], details, machine)
    return 0


def table_of(deaths: dict[str, list[Death]]) -> FigureTable:
    columns = (
        Column("requests are placed again after", "s", 2),
        Column("by a coordinator after", "s", 2),
        Column("P99 ITL before", "ms", 1),
        Column("P99 ITL after", "ms", 1),
        Column("after / before", "x", 2),
    )
    rows = tuple(
        Row(
            SHAPES[shape],
            (
                Figure.of([death.placed_again_s for death in found]),
                Figure.of([death.by_coordinator_s for death in found]),
                Figure.of([1e3 * death.itl_before_s for death in found]),
                Figure.of([1e3 * death.itl_after_s for death in found]),
                Figure.of([death.itl_after_s / death.itl_before_s for death in found]),
            ),
        )
        for shape, found in deaths.items()
    )
    return FigureTable(TITLE, "shape", columns, rows)


# --- the cluster -----------------------------------------------------------------------------------------------------


@contextmanager
def _running(shape: str, arguments: argparse.Namespace) -> Iterator[_Cluster]:
    """A cluster that is ready. Raises: BenchError if it does not become so."""
    with ExitStack() as stack:
        folder = stack.enter_context(socket_folder())
        port, coordinator_port, kv_port = _free_ports(3)
        config = folder / "actorserve.toml"
        config.write_text(
            _CONFIG.format(
                port=port,
                model=arguments.model,
                engine=arguments.engine,
                num_workers=_NUM_WORKERS,
                journals=folder / "journals",
            )
        )
        cluster_file = folder / "cluster.toml"
        cluster_file.write_text(_CLUSTER.format(port=coordinator_port, kv_port=kv_port))
        supervised = stack.enter_context(ExitStack())
        supervisors: dict[str, int] = {}
        log = folder / "log"
        hosts = {"": ["serve"]}
        if shape == "two-hosts":
            hosts = {name: ["host", name, "--cluster", str(cluster_file)] for name in ("alpha", "beta")}
        for name, verb in hosts.items():
            log = folder / f"{name}.log"
            errors = stack.enter_context(log.open("w"))
            command = [sys.executable, "-P", "-m", "actorserve", *verb, "--config", str(config)]
            supervisors[name] = supervised.enter_context(running(command, errors)).pid
        gateway = "gateway-0" if shape == "one-host" else "beta.gateway-0"
        cluster = _Cluster(supervisors, f"http://127.0.0.1:{port}", folder / "journals", gateway, log)
        _wait_ready(cluster)
        yield cluster
        supervised.close()
        # The journals are whole now, and their folder still exists.
        entries = entries_of(cluster.journals, gateway)
        cluster.entries += [entry for entry in entries if isinstance(entry.message, Placed | Started)]


def _wait_ready(cluster: _Cluster) -> None:
    until_s = time.monotonic() + _READY_S
    while time.monotonic() < until_s:
        with suppress(httpx.HTTPError):
            page = httpx.get(f"{cluster.url}/metrics", trust_env=False).text
            if f"\nactorserve_instances {_NUM_WORKERS}.0\n" in page and cluster.following()[1]:
                return
        time.sleep(_POLL_S)
    lines = cluster.log.read_text(encoding="utf-8", errors="replace").splitlines() or ["it printed nothing"]
    raise BenchError(f"the cluster is not ready after {_READY_S:g} s: {lines[-1][:300]}")


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("0.0.0.0", 0))) for _ in range(number)]
        return [int(each.getsockname()[1]) for each in sockets]


def _child(parent: int, name: str) -> int:
    """The process id of the child called ``name``. Raises: BenchError."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                is_child = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent
                if is_child and name in (entry / "cmdline").read_bytes().decode().split("\0"):
                    return int(entry.name)
    raise BenchError(f"{name} is not running")


# --- the load --------------------------------------------------------------------------------------------------------


async def _measure(cluster: _Cluster, arguments: argparse.Namespace) -> tuple[_Streams, list[float]]:
    """Kill under load. Returns what the streams got, and when the coordinators were killed. Raises: BenchError."""
    streams, killed, ended = _Streams(), [], asyncio.Event()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120.0, limits=limits, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        bodies = [_body(model, number, arguments.tokens) for number in range(arguments.streams)]
        expected = await asyncio.gather(*(_answer(client, body, _Streams()) for body in bodies))
        async with asyncio.TaskGroup() as group:
            for body, tokens in zip(bodies, expected, strict=True):
                group.create_task(_stream(client, body, tokens, streams, ended))
            group.create_task(_probe(client, _body(model, 0, 1), ended))
            try:
                for _ in range(arguments.kills):
                    await asyncio.sleep(arguments.seconds)
                    before = cluster.following()
                    host = before[0].rpartition("/")[0]
                    num_standbys = cluster.num_standbys(host)
                    killed.append(cluster.kill_coordinator())
                    async with asyncio.timeout(_TAKEOVER_S):
                        # The next death comes when the killed coordinator could take over again.
                        while cluster.following() == before or cluster.num_standbys(host) == num_standbys:  # noqa: ASYNC110
                            await asyncio.sleep(_POLL_S)
                    rest_s = killed[-1] + arguments.seconds - time.monotonic()
                    await asyncio.sleep(max(_SETTLE_S, rest_s))
            except TimeoutError:
                raise BenchError(f"no coordinator serves {_TAKEOVER_S:g} s after a death") from None
            finally:
                ended.set()
    return streams, killed


def _body(model: str, number: int, num_tokens: int) -> dict[str, object]:
    prompt = [number + 1, *range(100, 132)]
    same = {"seed": number, "ignore_eos": True, "logprobs": 1}
    return {"model": model, "prompt": prompt, "max_tokens": num_tokens, "stream": True, **same}


async def _answer(client: httpx.AsyncClient, body: dict[str, object], streams: _Streams) -> list[str]:
    """The tokens of one answer. Raises: BenchError if it fails."""
    tokens: list[str] = []
    last_s = 0.0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != httpx.codes.OK:
            raise BenchError(f"a request got {answer.status_code}: {(await answer.aread()).decode()[:200]}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "choices" not in event:
                raise BenchError(f"a request failed: {line[:200]}")
            [choice] = event["choices"]
            if choice["logprobs"] and choice["logprobs"]["tokens"]:
                tokens += choice["logprobs"]["tokens"]
                now = time.monotonic()
                if last_s:
                    streams.gaps.append((now, now - last_s))
                last_s = now
    streams.num_answers += 1
    return tokens


async def _stream(
    client: httpx.AsyncClient, body: dict[str, object], expected: list[str], streams: _Streams, ended: asyncio.Event
) -> None:
    while not ended.is_set():
        if await _answer(client, body, streams) != expected:
            raise BenchError("a stream got other tokens than without a death")


async def _probe(client: httpx.AsyncClient, body: dict[str, object], ended: asyncio.Event) -> None:
    """Short requests, one every ``PROBE_S``, whether or not earlier ones have been answered."""
    async with asyncio.TaskGroup() as group:
        while not ended.is_set():
            group.create_task(_answer(client, body, _Streams()))
            await asyncio.sleep(PROBE_S)


# --- what it cost ----------------------------------------------------------------------------------------------------


def _deaths(cluster: _Cluster, streams: _Streams, killed: Sequence[float], seconds: float) -> list[Death]:
    """Raises: BenchError if the journal tells of no placement after a death."""
    found = []
    for at_s in killed:
        again_s, by_coordinator_s = placed_after(at_s, cluster.entries)
        before_s, after_s = streams.p99_s(at_s - seconds, at_s), streams.p99_s(at_s, at_s + seconds)
        found.append(Death(again_s - at_s, by_coordinator_s - at_s, before_s, after_s))
    return found


def placed_after(killed_s: float, entries: Sequence[Entry]) -> tuple[float, float]:
    """When a worker started a request that had no place when the coordinator was killed, and when the gateway got the
    first placement of another coordinator. Raises: BenchError if it got none.
    """
    placements = [(entry.now, entry.sender, entry.message) for entry in entries if isinstance(entry.message, Placed)]
    victim = next((sender for at_s, sender, _ in reversed(placements) if at_s < killed_s), None)
    had_place = {message.request_id for _, sender, message in placements if sender == victim}
    had_place |= {message.request_id for at_s, _, message in placements if at_s < killed_s}
    placed = [at_s for at_s, sender, _ in placements if at_s > killed_s and sender != victim]
    started = [
        entry.now
        for entry in entries
        if entry.now > killed_s and isinstance(entry.message, Started) and entry.message.request_id not in had_place
    ]
    if not started or not placed:
        raise BenchError("no other coordinator has placed a request after a death")
    return min(started), min(placed)

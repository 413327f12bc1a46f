"""``tools/bench keys``: what encryption between hosts costs, on loopback.

Each round measures everything without keys and with them, in turns that alternate, so that other load on the machine
slows both alike. Ratios are those of the same round. The rates for a second of CPU time, of both processes together,
depend less on other load. Placements and tokens are messages between two processes that do nothing else, so a cluster,
which also decides and computes, loses less.
"""

import argparse
import asyncio
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import uvloop
from rich.console import Console
from rich.table import Table

from actorserve.core.effects import Fetch
from actorserve.core.kv.tickets import make_ticket
from actorserve.core.messages import KVAccess, Message, Peer, Place, Placed, Resend, Tokens, TransferId, TransferKind
from actorserve.wire.trust import Trust
from actorserve.wire.zmq_transport import ZmqTransport
from tools.benchmarks.cluster.keys_peer import ANYWHERE, BATCH, COORDINATOR, GATEWAY, HERE, KEYS, WORKER
from tools.benchmarks.cluster.peer_process import peer_process, read_line
from tools.benchmarks.cluster.transport_peer import KEY, make_pools
from tools.benchmarks.common.arguments import add_json, count, positive
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine
from workers.kv_transfer.transfer import KVTransfer

TITLE: Final = "What keys cost between hosts"
GOAL: Final = 0.9
PLACEMENTS, TOKENS, KV = "placements", "tokens", "KV"
_PIECES, _PIECE_BYTES = 180, 2048  # a block of 16 tokens of SmolLM2-135M
_WINDOW = 64  # requests at once that wait for a placement
_MESSAGES = 200  # of tokens, for each time that the gateway asks
_TIMEOUT_S = 30.0

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Rate(NamedTuple):
    """Placements, tokens or GB: in a second, and in a second of the CPU time of both processes."""

    per_s: float
    per_cpu_s: float


Way = Callable[[], Rate]
"""Measures once."""


class _Clocks:
    """Time and CPU time, of this process and another one, from now on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began_s, self._began_cpu_s = time.perf_counter(), self._cpu_s()

    @property
    def passed_s(self) -> float:
        return time.perf_counter() - self._began_s

    def rate(self, num: float) -> Rate:
        return Rate(num / self.passed_s, num / max(1 / _TICKS_PER_S, self._cpu_s() - self._began_cpu_s))

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return time.process_time() + (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=count, default=9, help="medians are shown (%(default)s)")
    parser.add_argument("--seconds", type=positive, default=1.0, help="of each measurement of messages (%(default)s)")
    parser.add_argument("--mib", type=count, default=64, help="KV that is read each time (%(default)s)")
    add_json(parser)


class _Messages:
    """A gateway that counts what a coordinator or a worker sends it for ``seconds``."""

    def __init__(self, role: str, keys: str, seconds: float) -> None:
        self._role, self._keys, self._seconds = role, keys, seconds
        self._peer: Peer = COORDINATOR if role == "coordinator" else WORKER
        self._numbers = itertools.count()

    def __call__(self) -> Rate:
        return uvloop.run(self._run())

    async def _run(self) -> Rate:
        transport = ZmqTransport(GATEWAY, ANYWHERE, trust=Trust(HERE, KEYS) if self._keys == "with" else None)
        with peer_process("keys_peer", self._role, self._keys, transport.address) as process:
            address = await asyncio.to_thread(read_line, process)
            transport.connect(self._peer, address, takes_bundles=True)
            try:
                await self._measure(transport, process.pid, 0.2)  # the connection's handshake, and caches
                return await self._measure(transport, process.pid, self._seconds)
            finally:
                transport.close()

    async def _measure(self, transport: ZmqTransport, pid: int, seconds: float) -> Rate:
        """The rate until ``seconds`` are over. What is on its way then arrives before the end."""
        done: asyncio.Future[Rate] = asyncio.get_running_loop().create_future()
        clocks = _Clocks(pid)
        counted, missing = 0, 0

        def ask(message: Message, num_answers: int) -> None:
            nonlocal missing
            missing += num_answers
            transport.send(self._peer, message)

        def ask_again() -> None:
            if clocks.passed_s >= seconds:
                if missing == 0 and not done.done():
                    done.set_result(clocks.rate(counted))
            elif self._role == "coordinator":
                while missing < _WINDOW:
                    ask(Place(f"gateway-0-{next(self._numbers)}", 1, 500), 1)
            elif missing <= _MESSAGES:
                ask(Resend("request", 1, _MESSAGES), _MESSAGES)

        def arrived() -> None:
            nonlocal counted, missing
            for _, message in transport.take():
                missing -= 1
                counted += BATCH if isinstance(message, Tokens) else int(isinstance(message, Placed))
            ask_again()

        transport.on_arrival(arrived)
        ask_again()
        try:
            return await asyncio.wait_for(done, seconds + _TIMEOUT_S)
        except TimeoutError:
            raise BenchError("messages between the two processes got lost") from None


class _Reads:
    """Reads ``num_blocks`` blocks of KV from another process, as from another host."""

    def __init__(
        self, transfer: KVTransfer, access: KVAccess, pid: int, num_blocks: int, numbers: Iterator[int]
    ) -> None:
        self._transfer, self._access, self._pid, self._numbers = transfer, access, pid, numbers
        self._blocks = tuple(range(num_blocks))

    def __call__(self) -> Rate:
        transfer_id = TransferId(TransferKind.MIGRATION, next(self._numbers))
        ticket = make_ticket(KEY, transfer_id, 0, self._blocks, on_host=False)
        clocks = _Clocks(self._pid)
        self._transfer.fetch(Fetch(1, WORKER, self._access, ticket, 0, self._blocks, is_urgent=False))
        return clocks.rate(len(self._blocks) * _PIECES * _PIECE_BYTES / 1e9)


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, list[Rate]]]:
    """The rates of each round, by what was measured, ``without`` and ``with`` keys. Raises: BenchError."""
    num_blocks = max(1, arguments.mib * 2**20 // (_PIECES * _PIECE_BYTES))
    numbers = itertools.count(1)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ways: dict[str, dict[str, Way]] = {PLACEMENTS: {}, TOKENS: {}, KV: {}}
        for keys in ("without", "with"):
            ways[PLACEMENTS][keys] = _Messages("coordinator", keys, arguments.seconds)
            ways[TOKENS][keys] = _Messages("worker", keys, arguments.seconds)
            source = stack.enter_context(peer_process("keys_peer", "kv", keys, num_blocks, _PIECES, _PIECE_BYTES))
            access = replace(KVAccess(**json.loads(read_line(source))), host="another", shared="")
            pools = make_pools(num_blocks, _PIECES, _PIECE_BYTES)
            trust = Trust(HERE, KEYS) if keys == "with" else None
            transfer = KVTransfer(pools, f"ipc://{folder}/{keys}", b"not used", trust=trust)
            stack.callback(transfer.close)
            ways[KV][keys] = _Reads(transfer, access, source.pid, num_blocks, numbers)
        rates: dict[str, dict[str, list[Rate]]] = {what: {keys: [] for keys in ways[what]} for what in ways}
        for number in range(arguments.rounds + 1):
            for what, both in ways.items():
                for keys in sorted(both, reverse=bool(number % 2)):
                    rate = both[keys]()
                    if number:  # the first round warms up
                        rates[what][keys].append(rate)
        return rates


def table_of(rates: dict[str, dict[str, list[Rate]]]) -> FigureTable:
    units = {PLACEMENTS: "/s", TOKENS: "/s", KV: " GB/s"}
    rows = []
    for what, both in rates.items():
        rounds = list(zip(both["without"], both["with"], strict=True))
        cells = (
            Figure.of([without.per_s for without, _ in rounds]),
            Figure.of([with_keys.per_s for _, with_keys in rounds]),
            Figure.of([with_keys.per_s / without.per_s for without, with_keys in rounds]),
            Figure.of([with_keys.per_cpu_s / without.per_cpu_s for without, with_keys in rounds]),
        )
        rows.append(Row(f"{what}{units[what]}", cells))
    ratios = Column("ratio", "x", 2), Column("ratio for the same CPU time", "x", 2)
    return FigureTable(TITLE, "what", (Column("without keys"), Column("with keys"), *ratios), tuple(rows))


def show(table: FigureTable, console: Console) -> None:
    shown = Table("what", "without keys", "with keys", "ratio", "for the same CPU time")
    for row in table.rows:
        without, with_keys, ratio, cpu_ratio = (cell.median for cell in row.cells if cell is not None)
        shown.add_row(row.name, f"{without:,.3g}", f"{with_keys:,.3g}", f"{ratio:.2f}x", f"{cpu_ratio:.2f}x")
    print_table(console, shown)
    say(console, f"goal for placements and tokens: {GOAL}x")


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    console = Console()
    machine = this_machine()
    table = table_of(measure(arguments))
    say(console, f"two processes on loopback; {machine_line(machine)}")
    show(table, console)
    save_figures(arguments, [table], machine=machine)
    return 0

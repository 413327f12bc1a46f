"""``tools/bench transport``: how fast KV blocks go from one process to another, each way beside plain copying.

The same blocks of a pool are read from a second process, in turn with a plain copy within one process, bare pyzmq with
messages of 1 MiB, and gloo (torch.distributed): all in each round, so that what else the machine does meets all
of them alike. Of each way the median over the rounds is shown.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import zmq
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from actorserve.core.effects import Fetch
from actorserve.core.kv.tickets import make_ticket
from actorserve.core.messages import KVAccess, Peer, TransferId, TransferKind
from tools.benchmarks.errors import BenchError
from tools.benchmarks.machine import machine_line, this_machine
from tools.benchmarks.report import write_json
from tools.benchmarks.transport_peer import KEY, make_pools
from workers.kv_transfer.transfer import KVTransfer

ROOT = Path(__file__).resolve().parents[2]
_SOURCE = Peer("source", 1)
_WINDOW = 4  # messages of bare pyzmq on their way
_MESSAGE_BYTES = 2**20  # of bare pyzmq's messages; as many blocks as this holds
_PLAIN, _SHARED, _GLOO = "memcpy", "shared memory", "gloo"
_TCP, _CHECKED, _UNIX = "TCP", "TCP, crc32", "Unix socket"
_BARE, _PLACED = "bare pyzmq TCP", "bare pyzmq TCP, put into place"
_MAX_ANSWER_S = 60.0
_RATIOS = (
    (_SHARED, _PLAIN, 0.5),
    (_SHARED, _GLOO, 1.0),
    (_TCP, _BARE, 0.9),
    (_TCP, _PLACED, None),
    (_CHECKED, _TCP, None),
    (_UNIX, _TCP, None),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A way's median rate, and its median ratio to plain copying in the same round."""

    name: str
    bytes_per_s: float
    of_memcpy: float


class _Ours:
    """Fetches by ``workers.kv_transfer`` from a source in a process of its own."""

    def __init__(
        self, transfer: KVTransfer, access: KVAccess, source_blocks: list[int], numbers: Iterator[int]
    ) -> None:
        self._transfer, self._access = transfer, access
        self._source_blocks = tuple(source_blocks)
        self._numbers = numbers

    def __call__(self) -> None:
        ticket = make_ticket(
            KEY, TransferId(TransferKind.MIGRATION, next(self._numbers)), 0, self._source_blocks, on_host=False
        )
        blocks = tuple(range(len(self._source_blocks)))
        self._transfer.fetch(Fetch(1, _SOURCE, self._access, ticket, 0, blocks, is_urgent=False))


def _plain(num_bytes: int) -> Callable[[], None]:
    source, target = np.ones(num_bytes, dtype=np.uint8), np.ones(num_bytes, dtype=np.uint8)
    return lambda: np.copyto(target, source)


def _bare(
    socket: "zmq.Socket[bytes]", num_messages: int, target: NDArray[np.uint8] | None = None
) -> Callable[[], None]:
    """Asks for messages one by one, and lets each fall, or copies each to its place in ``target``."""

    def read() -> None:
        socket.send(b"\0" * min(_WINDOW, num_messages))
        for index in range(num_messages):
            if not socket.poll(int(_MAX_ANSWER_S * 1000)):
                raise BenchError("the process that sends by bare pyzmq does not answer")
            frame = socket.recv(copy=False)
            if index + _WINDOW < num_messages:
                socket.send(b"\0")
            if target is not None:
                target[index] = np.frombuffer(frame.buffer, dtype=np.uint8)

    return read


@contextmanager
def _peer(*arguments: object) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "tools.benchmarks.transport_peer", *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise BenchError("a process that is measured with ended before it began")
    return line


def measure(arguments: argparse.Namespace) -> list[Row]:
    """All ways, one after another in each round. Raises: BenchError."""
    pieces, piece_bytes = arguments.pieces, arguments.block_tokens * arguments.token_bytes
    block_bytes = pieces * piece_bytes
    num_blocks = max(1, arguments.mib * 2**20 // block_bytes)
    num_bytes = num_blocks * block_bytes
    source_blocks = list(range(num_blocks))
    if arguments.scattered:
        source_blocks = np.random.default_rng(0).permutation(num_blocks).tolist()
    per_message = max(1, _MESSAGE_BYTES // block_bytes)
    num_messages = -(-num_blocks // per_message)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        pools = make_pools(num_blocks, pieces, piece_bytes)
        transfer = KVTransfer(pools, f"ipc://{folder}/here", b"not used")
        stack.callback(transfer.close)
        numbers = iter(range(10**9))
        ways: dict[str, Callable[[], None]] = {_PLAIN: _plain(num_bytes)}
        sources = {}
        for name, bind in (("tcp", "tcp://127.0.0.1:*"), ("ipc", f"ipc://{folder}/source")):
            process = stack.enter_context(_peer("source", bind, num_blocks, pieces, piece_bytes))
            sources[name] = KVAccess(**json.loads(_line(process)))
        for name, access in (
            (_SHARED, sources["tcp"]),
            (_TCP, replace(sources["tcp"], shared="")),
            (_CHECKED, replace(sources["tcp"], host="another")),
            (_UNIX, replace(sources["ipc"], shared="")),
        ):
            here = transfer
            if name != _SHARED:  # a link is of a source: each way has a reader of its own
                here = KVTransfer(pools, f"ipc://{folder}/{len(ways)}", b"not used")
                stack.callback(here.close)
            ways[name] = _Ours(here, access, source_blocks, numbers)
        sender = stack.enter_context(_peer("bare", per_message * block_bytes, num_messages))
        context = stack.enter_context(zmq.Context())
        socket = stack.enter_context(context.socket(zmq.DEALER))
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(_line(sender))
        ways[_BARE] = _bare(socket, num_messages)
        ways[_PLACED] = _bare(socket, num_messages, np.ones((num_messages, per_message * block_bytes), dtype=np.uint8))
        receiver = stack.enter_context(_peer("gloo", num_bytes, folder))
        ways[_GLOO] = lambda: _gloo(receiver)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(arguments.rounds + 1):
            order = list(ways) if number % 2 else list(reversed(ways))
            for name in order:
                began = time.perf_counter()
                ways[name]()
                if number:  # the first round warms up
                    times[name].append(time.perf_counter() - began)
    return [
        Row(
            name,
            num_bytes / statistics.median(times[name]),
            statistics.median(plain / took for plain, took in zip(times[_PLAIN], times[name], strict=True)),
        )
        for name in ways
    ]


def _gloo(receiver: "subprocess.Popen[str]") -> None:
    """It starts the process that sends by itself; so here is only asked for one more transfer."""
    assert receiver.stdin is not None
    receiver.stdin.write("\n")
    receiver.stdin.flush()
    _line(receiver)


def ratio(rows: list[Row], one: str, other: str) -> float:
    """How many times as fast ``one`` is."""
    rates = {row.name: row.bytes_per_s for row in rows}
    return rates[one] / rates[other]


def show(rows: list[Row], console: Console) -> None:
    table = Table("way", "GB/s", "of memcpy")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(row.name, f"{row.bytes_per_s / 1e9:.2f}", f"{row.of_memcpy:.2f}x")
    console.print(table)
    for one, other, goal in _RATIOS:
        shown = "" if goal is None else f" (goal {goal}x)"
        console.print(f"{one} / {other}: {ratio(rows, one, other):.2f}x{shown}", highlight=False)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    console = Console()
    machine = this_machine()
    rows = measure(arguments)
    order = "in any order" if arguments.scattered else "as neighbours"
    console.print(
        f"{arguments.mib} MiB of KV, blocks of {arguments.pieces} pieces of "
        f"{arguments.block_tokens * arguments.token_bytes} bytes, {order}; {machine_line(machine)}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    show(rows, console)
    if arguments.json is not None:
        workload = {name: value for name, value in vars(arguments).items() if name in _WORKLOAD}
        figures = {"machine": asdict(machine), "workload": workload, "rows": [asdict(row) for row in rows]}
        write_json(figures, arguments.json)
    return 0


_WORKLOAD = ("mib", "rounds", "block_tokens", "pieces", "token_bytes", "scattered")

"""``tools/bench transport``: how fast KV blocks go from one process to another, compared with plain copying.

The same blocks of a pool are read from a second process, in turn with a plain copy within one process, bare pyzmq with
messages of 1 MiB, and gloo (torch.distributed). Each round measures all ways, so that other load on the machine slows
all of them alike. Medians over the rounds are shown.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import zmq
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from actorserve.core.effects import Fetch
from actorserve.core.kv.tickets import make_ticket
from actorserve.core.messages import KVAccess, Peer, TransferId, TransferKind
from tools.benchmarks.cluster.peer_process import peer_process, read_line
from tools.benchmarks.cluster.transport_peer import KEY, make_pools
from tools.benchmarks.common.arguments import add_json
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.figures.figure import Column, Figure, FigureTable, Row as FigureRow
from tools.figures.machine import machine_line, this_machine
from workers.kv_transfer.transfer import KVTransfer

TITLE = "KV blocks from one worker to another"
RATIOS_TITLE = "KV transfer, ratios"
_SOURCE = Peer("source", 1)
_WINDOW = 4  # bare pyzmq's messages in flight
_MESSAGE_BYTES = 2**20  # a message of bare pyzmq; rounded down to whole blocks
_PLAIN, _SHARED, _GLOO = "memcpy", "shared memory", "gloo"
_TCP, _CHECKED, _UNIX = "TCP", "TCP, crc32", "Unix socket"
_BARE, _PLACED = "bare pyzmq TCP", "bare pyzmq TCP, copied into the pool"
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
    """One way's rate, and its ratio to plain copying in the same round."""

    name: str
    gb_per_s: Figure
    of_memcpy: Figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=64, help="KV that is read each time (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="medians are shown (%(default)s)")
    parser.add_argument("--block-tokens", type=int, default=16, help="tokens of a block (%(default)s)")
    parser.add_argument("--pieces", type=int, default=180, help="layers x 2 x KV heads (%(default)s: SmolLM2-135M)")
    parser.add_argument("--token-bytes", type=int, default=128, help="bytes of a piece per token (%(default)s)")
    parser.add_argument("--scattered", action="store_true", help="blocks in random order, not as neighbours")
    add_json(parser)


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
    """Asks for messages one by one, and drops them, or copies each to its place in ``target``."""

    def read() -> None:
        socket.send(b"\0" * min(_WINDOW, num_messages))
        for index in range(num_messages):
            if not socket.poll(int(_MAX_ANSWER_S * 1000)):
                raise BenchError("the process that sends over bare pyzmq does not answer")
            frame = socket.recv(copy=False)
            if index + _WINDOW < num_messages:
                socket.send(b"\0")
            if target is not None:
                target[index] = np.frombuffer(frame.buffer, dtype=np.uint8)

    return read


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
            source = peer_process("transport_peer", "source", bind, num_blocks, pieces, piece_bytes)
            sources[name] = KVAccess(**json.loads(read_line(stack.enter_context(source))))
        for name, access in (
            (_SHARED, sources["tcp"]),
            (_TCP, replace(sources["tcp"], shared="")),
            (_CHECKED, replace(sources["tcp"], host="another")),
            (_UNIX, replace(sources["ipc"], shared="")),
        ):
            here = transfer
            if name != _SHARED:  # a reader has one link to a source, so each way has its own reader
                here = KVTransfer(pools, f"ipc://{folder}/{len(ways)}", b"not used")
                stack.callback(here.close)
            ways[name] = _Ours(here, access, source_blocks, numbers)
        sender = stack.enter_context(peer_process("transport_peer", "bare", per_message * block_bytes, num_messages))
        context = stack.enter_context(zmq.Context())
        socket = stack.enter_context(context.socket(zmq.DEALER))
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(read_line(sender))
        ways[_BARE] = _bare(socket, num_messages)
        ways[_PLACED] = _bare(socket, num_messages, np.ones((num_messages, per_message * block_bytes), dtype=np.uint8))
        receiver = stack.enter_context(peer_process("transport_peer", "gloo", num_bytes, folder))
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
            Figure.of([num_bytes / seconds / 1e9 for seconds in times[name]]),
            Figure.of([plain / seconds for plain, seconds in zip(times[_PLAIN], times[name], strict=True)]),
        )
        for name in ways
    ]


def _gloo(receiver: "subprocess.Popen[str]") -> None:
    """Ask the receiver for one more transfer; it has started the sending process itself."""
    assert receiver.stdin is not None
    receiver.stdin.write("\n")
    receiver.stdin.flush()
    read_line(receiver)


def ratio(rows: list[Row], way: str, other: str) -> float:
    """The rate of ``way`` over that of ``other``."""
    rates = {row.name: row.gb_per_s.median for row in rows}
    return rates[way] / rates[other]


def show(rows: list[Row], console: Console) -> None:
    table = Table("way", "GB/s", "of memcpy")
    for row in rows:
        table.add_row(row.name, f"{row.gb_per_s.median:.2f}", f"{row.of_memcpy.median:.2f}x")
    print_table(console, table)
    for way, other, goal in _RATIOS:
        shown = "" if goal is None else f" (goal {goal}x)"
        say(console, f"{way} / {other}: {ratio(rows, way, other):.2f}x{shown}")


def tables_of(rows: list[Row], order: str) -> list[FigureTable]:
    columns = (Column("rate", "GB/s", 2), Column("of memcpy", "x", 2))
    rates = tuple(FigureRow(row.name, (row.gb_per_s, row.of_memcpy)) for row in rows)
    compared = tuple(FigureRow(f"{one} / {other}", (Figure(ratio(rows, one, other)),)) for one, other, _ in _RATIOS)
    return [
        FigureTable(f"{TITLE}, blocks {order}", "way", columns, rates),
        FigureTable(f"{RATIOS_TITLE}, blocks {order}", "ways", (Column("ratio", "x", 2),), compared),
    ]


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    console = Console()
    machine = this_machine()
    rows = measure(arguments)
    order = "in random order" if arguments.scattered else "as neighbours"
    blocks = f"blocks of {arguments.pieces} pieces of {arguments.block_tokens * arguments.token_bytes} bytes, {order}"
    say(console, f"{arguments.mib} MiB of KV, {blocks}; {machine_line(machine)}")
    show(rows, console)
    save_figures(arguments, tables_of(rows, order), machine=machine)
    return 0

"""``tools/bench step``: where the time of one iteration goes."""

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import track
from rich.table import Table

import workers.engines.torch_engine
from actorserve.errors import ActorserveError
from actorserve.model_files.locate import locate
from tools.benchmarks.common.arguments import add_json, counts
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.engine.arguments import add_one_engine
from tools.benchmarks.peers.ours import OurPeer
from tools.benchmarks.peers.protocol import BlockBudget
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine
from workers.kv.cache import KVCache
from workers.models.decoder import Decoder
from workers.sampling.sampler import Sampler

TITLE = "Where the time of one iteration goes, ms"
_REST = "sums, tiles, Python"
_TOTAL = "in all"
_LINEAR = ("workers.kernels.linear", "workers.kernels.quantized_linear")
_ATTENTION = ("workers.attention.tiled", "workers.attention.native")
_ROW_OPS = "workers.kernels.row_ops"


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Milliseconds of one iteration, in all and by part."""

    shape: str
    total_ms: Figure
    parts_ms: dict[str, Figure]


class Timers:
    """Adds up the time that wrapped functions take. If calls nest, the outermost counts."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.on = False
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._inside = False

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self.seconds[part] = 0.0

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.on or self._inside:
                return function(*args, **kwargs)
            self._inside = True
            began = self._clock()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += self._clock() - began
                self._inside = False

        return timed

    def wrap_method(self, part: str, owner: type | ModuleType, name: str) -> None:
        """Replace a class's method, or a module's function, by its timed version, for the rest of this process."""
        setattr(owner, name, self.wrap(part, getattr(owner, name)))

    def reset(self) -> None:
        self.seconds = dict.fromkeys(self.seconds, 0.0)


def _classes(module_name: str) -> list[type]:
    """The classes that a module defines, without protocols; none if this version has no such module."""
    if importlib.util.find_spec(module_name) is None:
        return []
    members = vars(importlib.import_module(module_name)).values()
    return [
        member
        for member in members
        if isinstance(member, type) and member.__module__ == module_name and Protocol not in member.__bases__
    ]


def install(timers: Timers) -> None:
    """Time what the engine calls. Call this before an engine is made, because models keep bound methods."""
    for part, modules in (("linear layers", _LINEAR), ("attention", _ATTENTION)):
        for layer in (found for module in modules for found in _classes(module) if "__call__" in vars(found)):
            timers.wrap_method(part, layer, "__call__")
    for operations in _classes(_ROW_OPS):
        for name, member in list(vars(operations).items()):
            if callable(member) and not name.startswith("_"):
                timers.wrap_method("norms, rotary, gates", operations, name)
    timers.wrap_method("KV writes", KVCache, "begin")
    timers.wrap_method("KV writes", KVCache, "write")
    timers.wrap_method("output head", Decoder, "logits")
    timers.wrap_method("batch making", workers.engines.torch_engine, "make_batch")
    timers.wrap_method("sampling", Sampler, "__call__")


def break_down(shape: str, iterate: Callable[[], object], rounds: int, timers: Timers) -> Breakdown:
    """Run iterations with timers (for the parts) and without timers (for the whole), in turns."""
    totals: list[float] = []
    parts: dict[str, list[float]] = {part: [] for part in timers.seconds}
    for number in range(rounds + 1):
        for timers.on in (False, True):
            timers.reset()
            began = time.perf_counter()
            iterate()
            seconds = time.perf_counter() - began
            if number == 0:  # the first round warms up
                continue
            if timers.on:
                for part, spent in timers.seconds.items():
                    parts[part].append(spent * 1e3)
            else:
                totals.append(seconds * 1e3)
    timers.on = False
    total = Figure.of(totals)
    timed = {part: Figure.of(times) for part, times in parts.items()}
    rest = max(0.0, total.median - sum(figure.median for figure in timed.values()))
    return Breakdown(shape, total, timed | {_REST: Figure(rest, rounds=rounds)})


def show(breakdowns: Sequence[Breakdown], console: Console) -> None:
    table = Table("ms of one iteration", *(breakdown.shape for breakdown in breakdowns))
    for part in breakdowns[0].parts_ms:
        cells = [
            f"{breakdown.parts_ms[part].median:.2f} ({share_percent(breakdown, part):.0f}%)" for breakdown in breakdowns
        ]
        table.add_row(part, *cells)
    table.add_section()
    table.add_row(_TOTAL, *(f"{breakdown.total_ms.median:.2f}" for breakdown in breakdowns))
    print_table(console, table)


def share_percent(breakdown: Breakdown, part: str) -> float:
    return 100 * breakdown.parts_ms[part].median / breakdown.total_ms.median


def table_of(breakdowns: Sequence[Breakdown]) -> FigureTable:
    """For each shape the milliseconds, and their share."""
    columns: list[Column] = []
    for breakdown in breakdowns:
        columns += [Column(breakdown.shape, "ms", 2), Column(f"{breakdown.shape}, share", "%", 0)]
    rows = []
    for part in breakdowns[0].parts_ms:
        cells: list[Figure | None] = []
        for breakdown in breakdowns:
            cells += [breakdown.parts_ms[part], Figure(share_percent(breakdown, part))]
        rows.append(Row(part, tuple(cells)))
    totals: list[Figure | None] = []
    for breakdown in breakdowns:
        totals += [breakdown.total_ms, None]
    return FigureTable(TITLE, "part", tuple(columns), (*rows, Row(_TOTAL, tuple(totals))))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_one_engine(parser)
    parser.add_argument("--dtype", default="int8", help="numeric mode of the engine (%(default)s)")
    parser.add_argument("--batches", type=counts, default=(1, 16), metavar="N,N", help="requests of decodes")
    parser.add_argument("--context", type=int, default=512, help="tokens before each decode (%(default)s)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill (%(default)s)")
    add_json(parser)


def _iterations(peer: OurPeer, batches: Sequence[int], prompt: int) -> Mapping[str, Callable[[], object]]:
    def decode(batch: int) -> Callable[[], object]:
        plan = peer.decode_plan(batch, 0)
        return lambda: peer.engine.begin(plan).result()

    decodes = {f"decode of {batch}": decode(batch) for batch in batches}
    return decodes | {f"prefill of {prompt}": lambda: peer.prefill(prompt)}


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    console = Console()
    machine = this_machine()
    timers = Timers()
    install(timers)
    num_threads = arguments.threads or machine.cores
    budget = BlockBudget(num_threads, arguments.context, max(arguments.batches), arguments.prompt, 1)
    try:
        peer = OurPeer(str(locate(arguments.model)), arguments.dtype, budget)
    except ActorserveError as error:
        raise BenchError(str(error)) from None
    iterations = _iterations(peer, arguments.batches, arguments.prompt)
    breakdowns = [
        break_down(shape, iterate, arguments.rounds, timers)
        for shape, iterate in track(iterations.items(), "measuring", console=console, transient=True)
    ]
    context = f"{arguments.context} tokens of context before a decode"
    say(console, f"{arguments.model}, {arguments.dtype}, {num_threads} threads, {context}; {machine_line(machine)}")
    show(breakdowns, console)
    save_figures(arguments, [table_of(breakdowns)], {"dtype": arguments.dtype}, machine)
    return 0

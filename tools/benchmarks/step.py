"""``tools/bench step``: where the time of one iteration goes."""

import argparse
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from types import ModuleType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import track
from rich.table import Table

import workers.engines.torch_engine
from actorserve.errors import ActorserveError
from actorserve.model_files.locate import locate
from tools.benchmarks.errors import BenchError
from tools.benchmarks.machine import machine_line, this_machine
from tools.benchmarks.peers.ours import OurPeer
from tools.benchmarks.peers.protocol import BlockBudget
from tools.benchmarks.report import write_json
from workers.kv.cache import KVCache
from workers.models.decoder import Decoder
from workers.sampling.sampler import Sampler

_REST = "sums, tiles, Python"
_LINEAR = ("workers.kernels.linear", "workers.kernels.quantized_linear")
_ATTENTION = ("workers.attention.tiled", "workers.attention.native")
_ROW_OPS = "workers.kernels.row_ops"


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Median milliseconds of one iteration, in all and by part."""

    shape: str
    total_ms: float
    parts_ms: dict[str, float]


class Timers:
    """Adds up the time that wrapped functions take; of nested ones, the outermost counts."""

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
        """Replace a class's method, or a module's function, by its timed self, for the rest of this process."""
        setattr(owner, name, self.wrap(part, getattr(owner, name)))

    def reset(self) -> None:
        self.seconds = dict.fromkeys(self.seconds, 0.0)


def _classes(module_name: str) -> list[type]:
    """The classes that a module defines, protocols left out; none where this version has no such module."""
    if importlib.util.find_spec(module_name) is None:
        return []
    members = vars(importlib.import_module(module_name)).values()
    return [
        each
        for each in members
        if isinstance(each, type) and each.__module__ == module_name and Protocol not in each.__bases__
    ]


def install(timers: Timers) -> None:
    """Time what the engine calls; to be done before one is made, for models keep bound methods."""
    for part, modules in (("linear layers", _LINEAR), ("attention", _ATTENTION)):
        for each in (each for module in modules for each in _classes(module) if "__call__" in vars(each)):
            timers.wrap_method(part, each, "__call__")
    for each in _classes(_ROW_OPS):
        for name, member in vars(each).items():
            if callable(member) and not name.startswith("_"):
                timers.wrap_method("norms, rotary, gates", each, name)
    timers.wrap_method("KV writes", KVCache, "begin")
    timers.wrap_method("KV writes", KVCache, "write")
    timers.wrap_method("output head", Decoder, "logits")
    timers.wrap_method("batch making", workers.engines.torch_engine, "make_batch")
    timers.wrap_method("sampling", Sampler, "__call__")


def break_down(shape: str, iterate: Callable[[], object], rounds: int, timers: Timers) -> Breakdown:
    """Iterations with timers, for the parts, and without, for the whole, in turns."""
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
    total = statistics.median(totals)
    medians = {part: statistics.median(each) for part, each in parts.items()}
    return Breakdown(shape, total, medians | {_REST: max(0.0, total - sum(medians.values()))})


def show(breakdowns: Sequence[Breakdown], console: Console) -> None:
    table = Table("ms of one iteration", *(each.shape for each in breakdowns))
    for column in table.columns[1:]:
        column.justify = "right"
    for part in breakdowns[0].parts_ms:
        cells = [f"{each.parts_ms[part]:.2f} ({100 * each.parts_ms[part] / each.total_ms:.0f}%)" for each in breakdowns]
        table.add_row(part, *cells)
    table.add_section()
    table.add_row("in all", *(f"{each.total_ms:.2f}" for each in breakdowns))
    console.print(table)


def _iterations(peer: OurPeer, batches: Sequence[int], prompt: int) -> Mapping[str, Callable[[], object]]:
    def decode(batch: int) -> Callable[[], object]:
        plan = peer.decode_plan(batch, 0)
        return lambda: peer.engine.step(plan)

    return {f"decode {batch}": decode(batch) for batch in batches} | {f"prefill {prompt}": lambda: peer.prefill(prompt)}


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    console = Console()
    machine = this_machine()
    timers = Timers()
    install(timers)
    num_threads = arguments.threads or machine.cores
    room = BlockBudget(num_threads, arguments.context, max(arguments.batches), arguments.prompt, 1)
    try:
        peer = OurPeer(str(locate(arguments.model)), arguments.dtype, room)
    except ActorserveError as error:
        raise BenchError(str(error)) from None
    iterations = _iterations(peer, arguments.batches, arguments.prompt)
    breakdowns = [
        break_down(shape, iterate, arguments.rounds, timers)
        for shape, iterate in track(iterations.items(), "measuring", console=console, transient=True)
    ]
    console.print(
        f"{arguments.model}, {arguments.dtype}, {num_threads} threads, {arguments.context} tokens of context before a "
        f"decode; {machine_line(machine)}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    show(breakdowns, console)
    if arguments.json is not None:
        figures = [asdict(each) for each in breakdowns]
        write_json({"machine": asdict(machine), "dtype": arguments.dtype, "iterations": figures}, arguments.json)
    return 0

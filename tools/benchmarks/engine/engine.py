"""``tools/bench engine``: our engine compared with llama.cpp and transformers, in turns and in one run."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tools.benchmarks.common.arguments import add_json, counts
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.engine.peers import LLAMA, OURS, SAME_FILE, add_peer_arguments, entries
from tools.benchmarks.peers.peer_process import PeerProcess
from tools.benchmarks.peers.protocol import BlockBudget, Shape
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import Machine, machine_line, this_machine

TITLE = "The engine alone, tokens/s"
RATIOS_TITLE = "Our engine's tokens/s over llama.cpp's"


@dataclass(frozen=True, slots=True)
class Result:
    """One engine: tokens per second of each shape (by its name), and the most memory that it held."""

    name: str
    tokens_per_s: dict[str, Figure]
    peak_memory_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_peer_arguments(parser)
    parser.add_argument("--prompts", type=counts, default=(128, 512, 2048), metavar="N,N", help="tokens of prefills")
    parser.add_argument("--batches", type=counts, default=(1, 4, 8, 16, 32), metavar="N,N", help="requests of decodes")
    parser.add_argument("--context", type=int, default=512, help="tokens before each decode (%(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds in which each engine has a turn; medians are shown"
    )
    add_json(parser)


def shapes(prompts: Sequence[int], batches: Sequence[int]) -> list[Shape]:
    return [Shape("prefill", size) for size in prompts] + [Shape("decode", size) for size in batches]


def measure(
    peers: Sequence[PeerProcess], shapes: Sequence[Shape], rounds: int, on_done: Callable[[], None] = lambda: None
) -> list[Result]:
    """Measure every shape ``rounds`` times with every engine, in turns. Another engine begins each round.

    Each shape shows the better median of an engine's settings. Raises: BenchError.
    """
    for shape in (min(shapes, key=lambda shape: shape.num_tokens), *shapes[-1:]):  # warm up
        for peer in peers:
            peer.measure(shape)
    speeds: dict[tuple[str, str], list[float]] = {
        (peer.entry.label, shape.name): [] for peer in peers for shape in shapes
    }
    for number in range(rounds):
        for shape in shapes:
            first = number % len(peers)
            for peer in (*peers[first:], *peers[:first]):
                speeds[peer.entry.label, shape.name].append(shape.num_tokens / peer.measure(shape))
                on_done()
    results: dict[str, Result] = {}
    for peer in peers:
        figures = {shape.name: Figure.of(speeds[peer.entry.label, shape.name]) for shape in shapes}
        result = Result(peer.entry.name, figures, peer.peak_memory_bytes())
        known = results.get(result.name)
        results[result.name] = result if known is None else _better(known, result)
    return list(results.values())


def _better(a: Result, b: Result) -> Result:
    speeds = {
        name: max(speed, b.tokens_per_s[name], key=lambda figure: figure.median)
        for name, speed in a.tokens_per_s.items()
    }
    return Result(a.name, speeds, min(a.peak_memory_bytes, b.peak_memory_bytes))


def ratios(results: Sequence[Result], shape: str) -> dict[str, dict[str, float]]:
    """For each engine of ours: its speed over llama.cpp's on the same file, and over llama.cpp's best format. Empty if
    llama.cpp did not run the same file.
    """
    llama = {result.name: result.tokens_per_s[shape].median for result in results if result.name.startswith(LLAMA)}
    if f"{LLAMA} {SAME_FILE}" not in llama:
        return {}
    return {
        result.name: {
            "same_file": result.tokens_per_s[shape].median / llama[f"{LLAMA} {SAME_FILE}"],
            "best": result.tokens_per_s[shape].median / max(llama.values()),
        }
        for result in results
        if result.name.startswith(OURS)
    }


def show(results: Sequence[Result], shapes: Sequence[Shape], console: Console) -> None:
    """Tokens per second of every engine; then the ratios of ours to llama.cpp."""
    table = Table("tokens/s", *(shape.name for shape in shapes), "peak MiB")
    compared = Table("times llama.cpp: same file / best", *(shape.name for shape in shapes))
    for result in results:
        speeds = [f"{result.tokens_per_s[shape.name].median:.0f}" for shape in shapes]
        table.add_row(result.name, *speeds, f"{result.peak_memory_bytes / 2**20:.0f}")
    found = {shape.name: ratios(results, shape.name) for shape in shapes}
    for result in results:
        cells = [found[shape.name].get(result.name) for shape in shapes]
        if all(cells):
            texts = [f"{cell['same_file']:.2f} / {cell['best']:.2f}" for cell in cells if cell]
            compared.add_row(result.name, *texts)
    print_table(console, table)
    if compared.row_count:
        print_table(console, compared)


def tables_of(results: Sequence[Result], shapes: Sequence[Shape]) -> list[FigureTable]:
    columns = tuple(Column(shape_column(shape), decimals=0) for shape in shapes)
    rows = tuple(
        Row(
            result.name,
            (
                *(result.tokens_per_s[shape.name] for shape in shapes),
                Figure(result.peak_memory_bytes / 2**20, rounds=1),
            ),
        )
        for result in results
    )
    tables = [FigureTable(TITLE, "engine", (*columns, Column("peak memory", "MiB", 0)), rows)]
    found = {shape.name: ratios(results, shape.name) for shape in shapes}
    compared = tuple(
        Row(f"{name}, {text}", tuple(Figure(found[shape.name][name][key]) for shape in shapes))
        for name in next(iter(found.values()), {})
        for key, text in (("best", "llama.cpp's best format"), ("same_file", "llama.cpp on the same file"))
    )
    if compared:
        ratio_columns = tuple(Column(shape_column(shape), "x", 2) for shape in shapes)
        tables.append(FigureTable(RATIOS_TITLE, "over", ratio_columns, compared))
    return tables


def shape_column(shape: Shape) -> str:
    return f"{shape.phase} of {shape.size:,}"


def make_budget(arguments: argparse.Namespace, machine: Machine, wanted: Sequence[Shape]) -> BlockBudget:
    decodes = [shape for shape in wanted if shape.phase == "decode"]
    return BlockBudget(
        num_threads=arguments.threads or machine.cores,
        context_tokens=arguments.context,
        max_batch=max((shape.size for shape in decodes), default=1),
        max_prompt_tokens=max(arguments.prompts, default=1),
        max_steps=max((shape.steps for shape in decodes), default=1),
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    console = Console()
    machine = this_machine()
    wanted = shapes(arguments.prompts, arguments.batches)
    budget = make_budget(arguments, machine, wanted)
    with ExitStack() as processes, Progress(console=console, transient=True) as progress:
        loading = progress.add_task("loading models", total=None)
        peers = []
        for entry in entries(arguments, console):
            peer = processes.enter_context(PeerProcess(entry, budget))
            try:
                peer.wait_ready()  # one after another, because they share the cores
            except BenchError as error:
                if entry.name.startswith(OURS):
                    raise
                say(console, f"without {error}")
                continue
            peers.append(peer)
        progress.update(loading, completed=1, total=1)
        bar = progress.add_task("measuring", total=len(peers) * len(wanted) * arguments.rounds)
        results = measure(peers, wanted, arguments.rounds, lambda: progress.advance(bar))
    context = f"{budget.context_tokens} tokens of context before a decode"
    say(console, f"{arguments.model}, {budget.num_threads} threads, {context}; {machine_line(machine)}")
    show(results, wanted, console)
    details = {"budget": asdict(budget), "ratios": {shape.name: ratios(results, shape.name) for shape in wanted}}
    save_figures(arguments, tables_of(results, wanted), details, machine)
    return 0

"""``tools/bench engine``: the engine alone, beside llama.cpp and transformers, in turns and in one run."""

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from actorserve.errors import ActorserveError
from actorserve.model_files.locate import locate
from tools.benchmarks import formats
from tools.benchmarks.errors import BenchError
from tools.benchmarks.machine import Machine, machine_line, this_machine
from tools.benchmarks.peers import build
from tools.benchmarks.peers.peer_process import Entry, PeerProcess
from tools.benchmarks.peers.protocol import BlockBudget, Shape
from tools.benchmarks.report import write_json

OURS = "actorserve"
LLAMA = "llama.cpp"
TRANSFORMERS = "transformers"
_PEERS = "tools.benchmarks.peers"


@dataclass(frozen=True, slots=True)
class Result:
    """One engine's figures: tokens per second of each shape (by its name), and the most memory that it held."""

    name: str
    tokens_per_s: dict[str, float]
    peak_memory_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_peer_arguments(parser)
    parser.add_argument("--prompts", type=counts, default=(128, 512, 2048), metavar="N,N", help="tokens of prefills")
    parser.add_argument("--batches", type=counts, default=(1, 4, 8, 16, 32), metavar="N,N", help="requests of decodes")
    parser.add_argument("--context", type=int, default=512, help="tokens before each decode (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="everyone takes a turn in each; medians are shown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")


def add_peer_arguments(parser: argparse.ArgumentParser) -> None:
    """Who takes part, and with what model and threads."""
    parser.add_argument("--model", default="default", help="default, a GGUF file, or a Hugging Face folder")
    parser.add_argument(
        "--dtypes", type=_names, default=("int8", "int4", "float32"), metavar="A,B", help="of ours (int8,int4,float32)"
    )
    parser.add_argument(
        "--formats", type=_names, default=formats.FORMATS, metavar="A,B", help="of llama.cpp, beside the file's own"
    )
    parser.add_argument("--only-ours", action="store_true", help="measure no peers")
    parser.add_argument("--threads", type=int, help="CPU threads of each peer (all cores)")


def counts(text: str) -> tuple[int, ...]:
    values = tuple(int(each) for each in text.split(","))
    if min(values) < 1:
        raise argparse.ArgumentTypeError("must be numbers of at least 1, with commas between them")
    return values


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def entries(arguments: argparse.Namespace, console: Console) -> list[Entry]:
    """Everyone who takes part; a peer that cannot is left out, with a line that says so. Raises: BenchError."""
    try:
        model = locate(arguments.model)
    except ActorserveError as error:
        raise BenchError(str(error)) from None
    chosen = [
        Entry(f"{OURS} {dtype}", "", f"{_PEERS}.ours", {"model": str(model), "dtype": dtype})
        for dtype in arguments.dtypes
    ]
    if arguments.only_ours:
        return chosen
    return chosen + _llama_entries(model, arguments.formats, console) + _transformers_entries(model, console)


def _llama_entries(model: Path, wanted: Sequence[str], console: Console) -> list[Entry]:
    built = build.find_build()
    if built is None:
        console.print(f"without {LLAMA}: {build.ADVICE}")
        return []
    if model.is_dir():
        console.print(f"without {LLAMA}: it reads GGUF files, and {model} is none", soft_wrap=True)
        return []
    files = {"same file": model} | {name: formats.converted(model, name, built) for name in wanted}
    return [
        Entry(
            f"{LLAMA} {name}",
            f"flash attention {'on' if flash_attention else 'off'}",
            f"{_PEERS}.llama",
            {"model": str(file), "flash_attention": flash_attention},
            built.python,
            built.environment,
        )
        for name, file in files.items()
        for flash_attention in (False, True)
    ]


def _transformers_entries(model: Path, console: Console) -> list[Entry]:
    return [Entry(f"{TRANSFORMERS} float32", "", f"{_PEERS}.hugging_face", {"model": str(model)})]


def shapes(prompts: Sequence[int], batches: Sequence[int]) -> list[Shape]:
    return [Shape("prefill", size) for size in prompts] + [Shape("decode", size) for size in batches]


def measure(
    peers: Sequence[PeerProcess], shapes: Sequence[Shape], rounds: int, on_done: Callable[[], None] = lambda: None
) -> list[Result]:
    """Every shape ``rounds`` times with everyone, in turns that begin with another one each time.

    Of an engine's settings, each shape shows the better median. Raises: BenchError.
    """
    for shape in (min(shapes, key=lambda each: each.num_tokens), *shapes[-1:]):  # warm up
        for peer in peers:
            peer.measure(shape)
    times: dict[tuple[str, str], list[float]] = {
        (peer.entry.label, shape.name): [] for peer in peers for shape in shapes
    }
    for number in range(rounds):
        for shape in shapes:
            first = number % len(peers)
            for peer in (*peers[first:], *peers[:first]):
                times[peer.entry.label, shape.name].append(peer.measure(shape))
                on_done()
    results: dict[str, Result] = {}
    for peer in peers:
        speeds = {
            shape.name: shape.num_tokens / statistics.median(times[peer.entry.label, shape.name]) for shape in shapes
        }
        result = Result(peer.entry.name, speeds, peer.peak_memory_bytes())
        known = results.get(result.name)
        results[result.name] = result if known is None else _better(known, result)
    return list(results.values())


def _better(a: Result, b: Result) -> Result:
    speeds = {name: max(speed, b.tokens_per_s[name]) for name, speed in a.tokens_per_s.items()}
    return Result(a.name, speeds, min(a.peak_memory_bytes, b.peak_memory_bytes))


def ratios(results: Sequence[Result], shape: str) -> dict[str, dict[str, float]]:
    """For each of ours: its speed over llama.cpp's on the same file, and over llama.cpp's best format."""
    llama = {each.name: each.tokens_per_s[shape] for each in results if each.name.startswith(LLAMA)}
    if not llama:
        return {}
    return {
        each.name: {
            "same_file": each.tokens_per_s[shape] / llama[f"{LLAMA} same file"],
            "best": each.tokens_per_s[shape] / max(llama.values()),
        }
        for each in results
        if each.name.startswith(OURS)
    }


def show(results: Sequence[Result], shapes: Sequence[Shape], console: Console) -> None:
    """Tokens per second of everyone; then the ratios of ours to llama.cpp."""
    table = Table("tokens/s", *(shape.name for shape in shapes), "peak MiB")
    compared = Table("times llama.cpp: same file / best", *(shape.name for shape in shapes))
    for each in (table, compared):
        for column in each.columns[1:]:
            column.justify = "right"
    for result in results:
        speeds = [f"{result.tokens_per_s[shape.name]:.0f}" for shape in shapes]
        table.add_row(result.name, *speeds, f"{result.peak_memory_bytes / 2**20:.0f}")
    found = {shape.name: ratios(results, shape.name) for shape in shapes}
    for result in results:
        cells = [found[shape.name].get(result.name) for shape in shapes]
        if all(cells):
            texts = [f"{cell['same_file']:.2f} / {cell['best']:.2f}" for cell in cells if cell]
            compared.add_row(result.name, *texts)
    console.print(table)
    if compared.row_count:
        console.print(compared)


def as_json(results: Sequence[Result], shapes: Sequence[Shape], machine: Machine, room: BlockBudget) -> dict[str, Any]:
    return {
        "machine": asdict(machine),
        "room": asdict(room),
        "results": [asdict(result) for result in results],
        "ratios": {shape.name: ratios(results, shape.name) for shape in shapes},
    }


def make_room(arguments: argparse.Namespace, machine: Machine, wanted: Sequence[Shape]) -> BlockBudget:
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
    room = make_room(arguments, machine, wanted)
    with ExitStack() as processes, Progress(console=console, transient=True) as progress:
        loading = progress.add_task("loading models", total=None)
        peers = []
        for entry in entries(arguments, console):
            peer = processes.enter_context(PeerProcess(entry, room))
            try:
                peer.wait_ready()  # one after another, for they have the same cores
            except BenchError as error:
                if entry.name.startswith(OURS):
                    raise
                console.print(f"without {error}", markup=False, highlight=False, soft_wrap=True)
                continue
            peers.append(peer)
        progress.update(loading, completed=1, total=1)
        bar = progress.add_task("measuring", total=len(peers) * len(wanted) * arguments.rounds)
        results = measure(peers, wanted, arguments.rounds, lambda: progress.advance(bar))
    console.print(
        f"{arguments.model}, {room.num_threads} threads, {room.context_tokens} tokens of context before a decode; "
        f"{machine_line(machine)}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    show(results, wanted, console)
    if arguments.json is not None:
        write_json(as_json(results, wanted, machine, room), arguments.json)
    return 0

"""``tools/bench handoff``: what it costs a request that its prompt and its tokens are computed by two workers.

Each way has two workers of its own on this machine, and takes a turn in each round. "unsplit": one worker computes all
of a request. "layer-wise": the token worker copies each chunk of the prompt's KV while the next chunk is computed, and
the last chunk's layer by layer while that is computed. "chunked": it copies the last chunk's KV in one piece, when the
last layer's is written. "serialized": it copies all KV in one piece, once the prompt is computed. A server chooses
between the first two by itself. The second token's delay is the time between the first two tokens, less the same time
unsplit, in decode steps of the unsplit request. All ways must give the same tokens. The model is that of ``tools/bench
migration``.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from tools.benchmarks.common.arguments import counts
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.migration.pair import DESTINATION, SOURCE, Pair
from tools.benchmarks.migration.set_up import (
    PairMaker,
    Requests,
    add_pair_arguments,
    model_shape,
    require_tokens,
    run_with_workers,
)
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

UNSPLIT, LAYER_WISE, CHUNKED, SERIALIZED = WAYS = ("unsplit", "layer-wise", "chunked", "serialized")
TITLE = "From the first token to the second, when another worker makes it"
_WARM_UP_TOKENS = 64
_ANSWER_TOKENS = 2048  # the most that a request may generate; more than any measurement takes
_MEASURED_TOKENS = 28


@dataclass(frozen=True, slots=True)
class Split:
    """A request's first token came after ``ttft_s``, the second ``gap_s`` later, and the others ``step_s`` apart, in
    the median. ``has_kv``: the second worker continued from the copied KV.
    """

    prompt_tokens: int
    way: str
    ttft_s: float
    gap_s: float
    step_s: float
    has_kv: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lengths = (64, 512, 1024, 4096)
    parser.add_argument("--lengths", type=counts, default=lengths, metavar="N,N", help="tokens of the prompts")
    parser.add_argument(
        "--rounds", type=int, default=7, help="rounds in which each way and length has a turn (%(default)s)"
    )
    parser.add_argument(
        "--mib-per-s", type=float, default=None, help="pace of copies while the prompt runs; default: the server's"
    )
    add_pair_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: ActorserveError, KeyboardInterrupt."""
    if min(arguments.rounds, arguments.threads) < 1:
        raise BenchError("--rounds and --threads must be at least 1")
    if len(set(arguments.lengths)) < len(arguments.lengths):
        raise BenchError("--lengths must be different numbers")
    console, machine = Console(), this_machine()
    max_tokens = max(*arguments.lengths, _WARM_UP_TOKENS) + _ANSWER_TOKENS
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        maker = PairMaker(arguments, folder, stack, len(WAYS), max_tokens)
        pairs = {way: maker.make(way, 2 * max_tokens, _settings(way, arguments)) for way in WAYS}
        with console.status("") as status:
            bench = _Bench(arguments, pairs, status.update)
            load_before = os.getloadavg()[0]
            run_with_workers(pairs.values(), bench.run, bench.tell)
    load_average = [load_before, os.getloadavg()[0]]
    say(console, f"two workers of {arguments.threads} thread(s) on {machine_line(machine)}")
    say(console, f"load average {load_average[0]:.1f} before, {load_average[1]:.1f} after")
    say(console, f"medians of {arguments.rounds} rounds; all ways gave the same tokens")
    show(bench.splits, console)
    details = {
        "load_average": load_average,
        "model": model_shape(max_tokens),
        "splits": [asdict(split) for split in bench.splits],
    }
    save_figures(arguments, [table_of(bench.splits)], details, machine)
    return 0


def _settings(way: str, arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    """No request finds its prompt in a cache, because another round has computed it."""
    migration: dict[str, object] = {
        "mode": "blocking" if way == SERIALIZED else "live",
        "layer_copies": "always" if way == LAYER_WISE else "never",
    }
    if arguments.mib_per_s is not None:
        migration["bytes_per_s"] = arguments.mib_per_s * 2**20
    return {"migration": migration}


class _Bench:
    """All rounds, once the workers are ready."""

    def __init__(self, arguments: argparse.Namespace, pairs: dict[str, Pair], tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.splits: list[Split] = []
        self._pairs = pairs
        self._arguments = arguments
        self._requests = Requests(arguments.seed)

    async def run(self) -> None:
        """Raises: BenchError."""
        for way in WAYS:
            self.tell(f"{way}: warming up")
            for number in range(2):
                await self._measure(way, _WARM_UP_TOKENS, -1 - number)
        rounds = self._arguments.rounds
        for number in range(rounds):
            for length in self._arguments.lengths:
                measured = []
                first = number % len(WAYS)
                for way in WAYS[first:] + WAYS[:first]:
                    self.tell(f"round {number + 1} of {rounds}: {length} tokens, {way}")
                    measured.append(await self._measure(way, length, number))
                require_tokens(measured[0][1], ((split.way, tokens) for split, tokens in measured))
                self.splits += [split for split, _ in measured]

    async def _measure(self, way: str, length: int, number: int) -> tuple[Split, list[int]]:
        pair = self._pairs[way]
        request = self._requests.make(f"prompt-{number}-{length}", length, _ANSWER_TOKENS)
        stream = pair.open(request, SOURCE, None if way == UNSPLIT else DESTINATION)
        await pair.until_made([stream], _MEASURED_TOKENS)
        token_ids, times_s = stream.token_ids[:_MEASURED_TOKENS], stream.times_s[:_MEASURED_TOKENS]
        has_kv = stream.migration is not None
        if (stream.handed_over_s is not None) == (way == UNSPLIT):
            raise BenchError(f"{way}: the request was {'' if way == UNSPLIT else 'not '}handed over")
        opened_s = stream.opened_s
        await pair.end_all()
        step_s = median(after - before for before, after in pairwise(times_s[2:]))
        split = Split(length, way, times_s[0] - opened_s, times_s[1] - times_s[0], step_s, has_kv)
        return split, token_ids


def delays(splits: Sequence[Split], length: int, way: str) -> list[float]:
    """How many steps of the unsplit request the second token is late, in each round."""
    of_way = [split for split in splits if (split.prompt_tokens, split.way) == (length, way)]
    unsplit = [split for split in splits if (split.prompt_tokens, split.way) == (length, UNSPLIT)]
    step_s = median(split.step_s for split in unsplit)
    return [(split.gap_s - whole.gap_s) / step_s for split, whole in zip(of_way, unsplit, strict=True)]


def table_of(splits: Sequence[Split]) -> FigureTable:
    rows = []
    for length in dict.fromkeys(split.prompt_tokens for split in splits):
        found = {way: [s for s in splits if (s.prompt_tokens, s.way) == (length, way)] for way in WAYS}
        gaps_ms = (Figure.of([1e3 * split.gap_s for split in found[way]]) for way in WAYS)
        late = (Figure.of(delays(splits, length, way)) for way in WAYS[1:])
        rows.append(Row(f"{length:,} tokens", (*gaps_ms, *late)))
    columns = (*(Column(way, "ms", 1) for way in WAYS), *(Column(f"{way}, late by", "steps", 1) for way in WAYS[1:]))
    return FigureTable(TITLE, "prompt", columns, tuple(rows))


def show(splits: Sequence[Split], console: Console) -> None:
    """Print for a person."""
    titles = ("prompt", "TTFT, ms", "step, ms", *(f"{way}, ms" for way in WAYS), *(f"{w}, steps" for w in WAYS[1:]))
    table = Table(*titles, "with KV", title=TITLE, title_justify="left")
    for length in dict.fromkeys(split.prompt_tokens for split in splits):
        found = {way: [s for s in splits if (s.prompt_tokens, s.way) == (length, way)] for way in WAYS}
        handed_over = [split for way in WAYS[1:] for split in found[way]]
        table.add_row(
            f"{length:,}",
            f"{1e3 * median(split.ttft_s for split in found[UNSPLIT]):.0f}",
            f"{1e3 * median(split.step_s for split in found[UNSPLIT]):.1f}",
            *(f"{1e3 * median(split.gap_s for split in found[way]):.1f}" for way in WAYS),
            *(f"{median(delays(splits, length, way)):.1f}" for way in WAYS[1:]),
            f"{sum(split.has_kv for split in handed_over)}/{len(handed_over)}",
        )
    print_table(console, table, first_numeric=0)

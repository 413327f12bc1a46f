"""``tools/bench migration``: what moving a running request costs it and its neighbours, live and in other ways.

Each way has two workers of its own on this machine, and takes a turn at each length in each round. A request decodes on
the source, others beside it on both; then the source is told to move it. Times are taken where the gateway hands out
tokens, which must be those of the same request where it stays, or there is no figure. The model is made for this:
random weights, grouped queries, and a context that is long enough.
"""

import argparse
import asyncio
import itertools
import json
import random
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from actorserve.core.messages import RequestSpec, SamplingParams
from actorserve.core.migration.config import MigrationMode
from actorserve.host import available_memory_bytes
from actorserve.processes import launch
from actorserve.settings import load_settings
from actorserve.wire.journal import Entry
from tools.benchmarks.engine import counts
from tools.benchmarks.errors import BenchError
from tools.benchmarks.journals import entries_of
from tools.benchmarks.machine import machine_line, this_machine
from tools.benchmarks.migration_figures import (
    PARTS,
    Figures,
    Move,
    by_length,
    figures_of,
    gaps_of,
    goals_of,
    num_stages,
    parts_of,
    slowdown_of,
    usual_gap_s,
)
from tools.benchmarks.migration_pair import DESTINATION, GATEWAY, SOURCE, Pair, Stream, with_workers
from tools.benchmarks.prompts import prompt_token_ids
from tools.benchmarks.report import write_json

WAYS = tuple(str(mode) for mode in MigrationMode)
MODEL_NAME = "bench-migration"
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
ID_RANGE = (16, SHAPE["vocab_size"])
_MOVED_ROOM_TOKENS = 1024  # that who is moved may make; more than any measurement takes
_NEIGHBOUR_ROOM_TOKENS = 4096  # and its neighbours, who go on while its KV is computed anew
_WARM_UP_TOKENS = 64
_KV_BYTES = 2  # of a number, in the modes that CPUs serve in
_AFTER_TOKENS = 4  # made at the destination before a measurement ends
_SIDES = (SOURCE, DESTINATION)


@dataclass(frozen=True, slots=True)
class _Measured:
    """A move before the journals are read."""

    context_tokens: int
    way: str
    subject: Stream
    steady_s: float  # from here on it and all neighbours decode
    ordered_s: float
    copied_bytes: int
    has_adopted: bool
    slowdown: dict[str, float | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lengths = (256, 1024, 2048, 4096, 8192)
    parser.add_argument(
        "--lengths", type=counts, default=lengths, metavar="N,N", help="prompts of who is moved, in tokens"
    )
    parser.add_argument("--ways", type=_ways, default=WAYS, metavar="A,B", help=f"to move it ({','.join(WAYS)})")
    parser.add_argument("--rounds", type=int, default=5, help="each way and length has a turn in each (%(default)s)")
    parser.add_argument("--neighbours", type=int, default=4, help="on source and destination, each (%(default)s)")
    parser.add_argument("--neighbour-tokens", type=int, default=512, help="their prompts (%(default)s)")
    parser.add_argument("--before", type=int, default=24, help="tokens that it makes before it is moved (%(default)s)")
    parser.add_argument("--mib-per-s", type=float, help="of KV that is copied while its request runs (no bound)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each worker (%(default)s)")
    parser.add_argument("--dtype", default="int8", choices=("int8", "int4", "bfloat16"), help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed, the same requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the downtime there, as PNG")
    parser.add_argument("--engine", default="torch", help=argparse.SUPPRESS)


def _ways(text: str) -> tuple[str, ...]:
    ways = tuple(text.split(","))
    if len(set(ways)) < len(ways) or not set(ways) <= set(WAYS):
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(WAYS)}, with commas between them")
    return ways


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: ActorserveError, KeyboardInterrupt."""
    _check(arguments)
    console = Console()
    machine = this_machine()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        model = folder / MODEL_NAME
        model.mkdir()
        shape = SHAPE | {"max_position_embeddings": _max_tokens(arguments)}
        (model / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        pairs = {way: _pair(way, arguments, model, folder / way, stack) for way in arguments.ways}
        measured: list[_Measured] = []
        with console.status("") as status:
            uvloop.run(_until_interrupted(_Bench(arguments, pairs, measured, status.update)))
        moves = [_move(each, pairs[each.way]) for each in measured]
    figures = [
        figures_of([move for move in moves if (move.context_tokens, move.way) == (length, way)])
        for length in arguments.lengths
        for way in arguments.ways
    ]
    _say(console, f"two workers of {arguments.threads} thread(s) on {machine_line(machine)}")
    around = f"{arguments.neighbours} neighbours of {arguments.neighbour_tokens} tokens on each"
    _say(console, f"{around}; medians of {arguments.rounds} rounds; no move changed a token")
    show(figures, console)
    if arguments.json is not None:
        told = {"machine": asdict(machine), "model": shape, "figures": [asdict(each) for each in figures]}
        told["goals"] = [asdict(goal) | {"is_met": goal.is_met} for goal in goals_of(figures)]
        write_json(told | {"moves": [asdict(each) for each in moves]}, arguments.json)
    if arguments.plot is not None:
        from tools.benchmarks.migration_plot import write_plot  # takes a while to load

        write_plot(figures, arguments.plot)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if min(arguments.rounds, arguments.threads, arguments.neighbour_tokens) < 1 or arguments.neighbours < 0:
        raise BenchError("--rounds, --threads and --neighbour-tokens must be at least 1, --neighbours at least 0")
    if len(set(arguments.lengths)) < len(arguments.lengths):
        raise BenchError("--lengths must be different numbers")
    if not 4 <= arguments.before <= _MOVED_ROOM_TOKENS // 4:
        raise BenchError(f"--before must be from 4 to {_MOVED_ROOM_TOKENS // 4}")


def _max_tokens(arguments: argparse.Namespace) -> int:
    moved = max(*arguments.lengths, _WARM_UP_TOKENS) + _MOVED_ROOM_TOKENS
    return int(max(moved, arguments.neighbour_tokens + _NEIGHBOUR_ROOM_TOKENS))


def _pair(way: str, arguments: argparse.Namespace, model: Path, folder: Path, stack: ExitStack) -> Pair:
    folder.mkdir()
    others = arguments.neighbours * (arguments.neighbour_tokens + _NEIGHBOUR_ROOM_TOKENS)
    kv_tokens = (_max_tokens(arguments) + others) * 3 // 2  # nobody has to give way, nor the neighbours' cached prompts
    settings = load_settings(
        None,
        {
            "model": {"path": str(model), "load_format": "dummy", "dtype": arguments.dtype},
            "workers": {
                "count": 2,
                "device": "cpu",
                "engine": arguments.engine,
                "threads": arguments.threads,
                "memory_bytes": max(1, available_memory_bytes() // (2 * len(arguments.ways))),
                "kv_cache_bytes": kv_tokens * kv_bytes_per_token(arguments.engine),
                "host_kv_bytes": 0,
                "max_context_tokens": _max_tokens(arguments),
            },
            "cluster": {"journal_dir": str(folder)},
            "migration": {"mode": way, "bytes_per_s": arguments.mib_per_s and round(arguments.mib_per_s * 2**20)},
        },
    )
    resolved, placement = launch.resolve_workers(settings)
    runtime_dir = stack.enter_context(launch.runtime_dir(resolved))
    return Pair(way, resolved, placement, runtime_dir)


def kv_bytes_per_token(engine: str) -> int:
    if engine == "fake":
        from workers.engines.fake_engine import BYTES_PER_TOKEN

        return BYTES_PER_TOKEN
    head_dim = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
    return int(2 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * head_dim * _KV_BYTES)


async def _until_interrupted(bench: "_Bench") -> None:
    """Do it, and end all processes, also where that is asked for before the time."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await with_workers(bench.pairs.values(), bench.run, bench.tell)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


class _Bench:
    """All rounds, once the workers are there."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        pairs: dict[str, Pair],
        measured: list[_Measured],
        tell: Callable[[str], None],
    ):
        self.pairs = pairs
        self.tell = tell
        self._arguments = arguments
        self._measured = measured
        self._numbers = itertools.count()

    async def run(self) -> None:
        """Raises: BenchError."""
        arguments = self._arguments
        for way in arguments.ways:
            self.tell(f"{way}: warming up")
            await self._measure(way, _WARM_UP_TOKENS, -1)  # the first move between two workers has them meet
        ways = list(arguments.ways)
        for number in range(arguments.rounds):
            first = number % len(ways)
            for length in arguments.lengths:
                measured = []
                for way in (*ways[first:], *ways[:first]):
                    self.tell(f"round {number + 1} of {arguments.rounds}: {length} tokens, {way}")
                    measured.append(await self._measure(way, length, number))
                self.tell(f"round {number + 1} of {arguments.rounds}: {length} tokens, and no move")
                num_tokens = min(len(each.subject.token_ids) for each in measured)
                require_tokens(await self._unmoved(ways[0], length, number, num_tokens), measured)
                self._measured += measured

    async def _measure(self, way: str, length: int, number: int) -> _Measured:
        arguments, pair = self._arguments, self.pairs[way]
        subject = pair.open(self._moved(length, number), SOURCE)
        await pair.until_made([subject], 1)
        neighbours = {
            side: [pair.open(self._neighbour(side, each), side) for each in range(arguments.neighbours)]
            for side in _SIDES
        }
        everybody = [stream for streams in neighbours.values() for stream in streams]
        await pair.until_made(everybody, 1)
        await pair.until_made([subject], len(subject.times_s) + arguments.before)
        before = await pair.fresh_reports()
        ordered_s = pair.order_move(self._order_bytes(pair, length + len(subject.times_s)))
        handed_over_s = await pair.until_handed_over(subject)
        num_at_source = sum(at_s <= handed_over_s for at_s in subject.times_s)
        await pair.until_made([subject], num_at_source + _AFTER_TOKENS)
        for stream in everybody:
            await pair.until_made([stream], len(stream.times_s) + 1)
        after = await pair.fresh_reports()
        # Where KV is computed anew that is part of the move.
        end_s = handed_over_s if subject.migration else subject.times_s[num_at_source]
        steady_s = max(each.times_s[0] for each in (subject, *everybody))
        slowdown = {
            name: slowdown_of([each.times_s for each in neighbours[side]], steady_s, ordered_s, end_s)
            for name, side in (("source", SOURCE), ("destination", DESTINATION))
        }
        if any(stream.handed_over_s is not None for stream in everybody):
            raise BenchError(f"{way}: a neighbour was moved")
        await pair.end_all()
        return _Measured(
            length,
            way,
            subject,
            steady_s,
            ordered_s,
            after[SOURCE].migrated_bytes - before[SOURCE].migrated_bytes if subject.migration else 0,
            after[DESTINATION].num_tokens_looked_up == before[DESTINATION].num_tokens_looked_up,
            slowdown,
        )

    async def _unmoved(self, way: str, length: int, number: int, num_tokens: int) -> list[int]:
        """The tokens of the same request where it stays. Raises: BenchError."""
        pair = self.pairs[way]
        subject = pair.open(self._moved(length, number), SOURCE)
        await pair.until_made([subject], num_tokens)
        await pair.end_all()
        return subject.token_ids[:num_tokens]

    def _moved(self, length: int, number: int) -> RequestSpec:
        """The one that is moved first, for it is the least urgent. No two prompts begin alike, or the destination might
        hold what it is to be sent.
        """
        return self._request(f"moved-{number}-{length}", length, _MOVED_ROOM_TOKENS, priority=1)

    def _neighbour(self, side: str, number: int) -> RequestSpec:
        return self._request(f"{side}-neighbour-{number}", self._arguments.neighbour_tokens, _NEIGHBOUR_ROOM_TOKENS)

    def _request(self, name: str, num_tokens: int, room_tokens: int, priority: int = 0) -> RequestSpec:
        rng = random.Random(f"{self._arguments.seed} {name}")
        prompt = prompt_token_ids(num_tokens, ID_RANGE, rng)
        sampling = SamplingParams(seed=rng.randrange(2**32), max_tokens=room_tokens - 1)
        return RequestSpec(f"{name}-{next(self._numbers)}", tuple(prompt), sampling, priority=priority)

    def _order_bytes(self, pair: Pair, num_tokens: int) -> int:
        """Enough for who has so many tokens, and too little for a neighbour beside it."""
        report = pair.reports()[SOURCE]
        return (num_tokens // report.tokens_per_block + 2) * report.bytes_per_block


def require_tokens(expected: Sequence[int], measured: Sequence[_Measured]) -> None:
    """Raises: BenchError, where a request that was moved did not give the tokens that it gives where it stays."""
    for each in measured:
        if tuple(each.subject.token_ids[: len(expected)]) != tuple(expected):
            raise BenchError(f"{each.way}: a request of {each.context_tokens} tokens was moved and gave other tokens")


def _move(measured: _Measured, pair: Pair) -> Move:
    """Raises: BenchError."""
    subject = measured.subject
    handed_over_s, times_s = subject.handed_over_s, subject.times_s
    assert handed_over_s is not None
    assert pair.journal_dir is not None
    parts: dict[str, float] = {}
    stages = 0
    if subject.migration is not None:
        last = sum(at_s <= handed_over_s for at_s in times_s) - 1

        def journal(name: str) -> list[Entry]:
            assert pair.journal_dir is not None
            within_s = (measured.ordered_s - 1.0, times_s[last + 1] + 1.0)
            return [entry for entry in entries_of(pair.journal_dir, name) if within_s[0] <= entry.now <= within_s[1]]

        destination = journal(DESTINATION)
        stages = num_stages(destination, subject.migration)
        parts = parts_of(
            journal(GATEWAY), destination, subject.migration, subject.request_id, times_s[last], times_s[last + 1]
        )
    downtime_s, longest_gap_s = gaps_of(times_s, measured.ordered_s, handed_over_s)
    return Move(
        context_tokens=measured.context_tokens,
        way=measured.way,
        step_s=usual_gap_s(times_s, measured.steady_s, measured.ordered_s),
        downtime_s=downtime_s,
        longest_gap_s=longest_gap_s,
        duration_s=handed_over_s - measured.ordered_s,
        has_adopted=measured.has_adopted,
        num_stages=stages,
        copied_bytes=measured.copied_bytes,
        slowdown=measured.slowdown,
        parts=parts,
    )


def show(figures: Sequence[Figures], console: Console) -> None:
    """Print for a person."""
    ways = list(dict.fromkeys(each.way for each in figures))
    table = Table(
        "context", "step, ms", *(f"{way}, ms (steps)" for way in ways), title="downtime", title_justify="left"
    )
    for length, of_way in by_length(figures).items():
        downtimes = (f"{of_way[way].downtime_s * 1e3:.0f} ({of_way[way].downtime_steps:.1f})" for way in ways)
        table.add_row(f"{length:,}", f"{of_way[ways[0]].step_s * 1e3:.1f}", *downtimes)
    _print(table, console)
    table = Table(
        *("context", "way", "ms", "stages", "MiB", "with KV", "worst steps", "longest gap", "source", "destination"),
        title="from the order until it is handed over; neighbours: time a token meanwhile over that before",
        title_justify="left",
    )
    for each in figures:
        table.add_row(
            f"{each.context_tokens:,}",
            each.way,
            f"{each.duration_s * 1e3:.0f}",
            f"{each.num_stages:g}",
            f"{each.copied_bytes / 2**20:.1f}",
            f"{each.num_adopted}/{each.num_moves}",
            f"{each.worst_downtime_steps:.1f}",
            f"{each.longest_gap_steps:.1f}",
            *("-" if value is None else f"{value:.2f}" for value in each.slowdown.values()),
        )
    _print(table, console)
    live = [each for each in figures if each.way == "live"]
    if live:
        table = Table(
            "until, ms", *(f"{each.context_tokens:,}" for each in live), title="live downtime", title_justify="left"
        )
        for name, text in PARTS.items():
            table.add_row(text, *(f"{each.parts[name] * 1e3:.1f}" if each.parts else "-" for each in live))
        _print(table, console)
    for goal in goals_of(figures):
        _say(
            console, f"{goal.name}: {goal.value:.2f}; goal at most {goal.limit:g}: {'met' if goal.is_met else 'missed'}"
        )


def _print(table: Table, console: Console) -> None:
    for column in table.columns:
        column.justify = "right"
    console.print(table)


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)

"""``tools/bench checkpoints``: what a worker's death costs a running request, with and without KV checkpoints.

Each way has two workers of its own on this machine, and takes a turn in each round. A request decodes on the source,
which is killed with SIGKILL; the pause lasts from when the gateway notices the death until the destination's first
token. The tokens must be those of the same request when no worker dies, or the measurement fails. The cost of
checkpoints while no worker dies shows in the throughput and the CPU time of both workers. The model is that of
``tools/bench migration``.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from actorserve.core.messages import RequestSpec
from tools.benchmarks.common import processes
from tools.benchmarks.common.arguments import counts
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.migration.pair import DESTINATION, SOURCE, Pair, Stream
from tools.benchmarks.migration.set_up import (
    PairMaker,
    Requests,
    add_pair_arguments,
    model_shape,
    require_tokens,
    run_with_workers,
    undisturbed_tokens,
)
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

WITHOUT, WITH = WAYS = ("without", "with")
PAUSES = "From when the gateway notices a worker's death to the request's next token"
COSTS = "Without a death: decode throughput, and CPU time per token"
_SIDES = {SOURCE: "source", DESTINATION: "store"}
_ANSWER_TOKENS = 2048  # the most that a request may generate; more than any measurement takes
_WARM_UP_TOKENS = 64
_AFTER_TOKENS = 8  # generated at the destination before a measurement ends


@dataclass(frozen=True, slots=True)
class Death:
    """A request of ``context_tokens`` lost its worker.

    ``detection_s`` is the time until the gateway noticed, ``pause_s`` the time from there to the next token.
    ``has_adopted``: the destination continued from checkpoints.
    """

    context_tokens: int
    way: str
    detection_s: float
    pause_s: float
    has_adopted: bool


@dataclass(frozen=True, slots=True)
class Decoding:
    """One worker's throughput while no worker died. ``cpu_s``: the worker's CPU time per token."""

    way: str
    side: str
    tokens_per_s: float
    cpu_s: float
    checkpointed_bytes: int


@dataclass(frozen=True, slots=True)
class _Killed:
    """A death, and the tokens that the request's client got."""

    death: Death
    token_ids: list[int]

    @property
    def name(self) -> str:
        return f"{self.death.way} checkpoints: a request of {self.death.context_tokens} tokens"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lengths = (1024, 4096, 8192)
    parser.add_argument("--lengths", type=counts, default=lengths, metavar="N,N", help="prompts of the killed requests")
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds in which each way and length has a turn (%(default)s)"
    )
    parser.add_argument("--every", type=int, default=64, help="tokens between checkpoints (%(default)s)")
    parser.add_argument("--before", type=int, default=24, help="tokens generated before the death (%(default)s)")
    parser.add_argument("--streams", type=int, default=4, help="requests on each side without a death (%(default)s)")
    parser.add_argument(
        "--stream-tokens", type=int, default=512, help="length of those requests' prompts (%(default)s)"
    )
    parser.add_argument(
        "--measured", type=int, default=256, help="tokens that each of those requests generates (%(default)s)"
    )
    add_pair_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: ActorserveError, KeyboardInterrupt."""
    _check(arguments)
    console, machine = Console(), this_machine()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        maker = PairMaker(arguments, folder, stack, len(WAYS), _max_tokens(arguments))
        pairs = {way: _pair(way, arguments, maker) for way in WAYS}
        with console.status("") as status:
            bench = _Bench(arguments, pairs, status.update)
            load_before = os.getloadavg()[0]
            run_with_workers(pairs.values(), bench.run, bench.tell, max_restarts=10**6)
    say(console, f"two workers of {arguments.threads} thread(s) on {machine_line(machine)}")
    load_average = [load_before, os.getloadavg()[0]]
    say(console, f"load average {load_average[0]:.1f} before, {load_average[1]:.1f} after")
    what = f"medians of {arguments.rounds} rounds; checkpoints every {arguments.every} tokens"
    say(console, f"{what}; no death changed a token")
    show(bench.deaths, bench.decodings, console)
    details = {
        "load_average": load_average,
        "model": model_shape(_max_tokens(arguments)),
        "deaths": [asdict(death) for death in bench.deaths],
        "decodings": [asdict(decoding) for decoding in bench.decodings],
    }
    save_figures(arguments, tables_of(bench.deaths, bench.decodings), details, machine)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if min(arguments.rounds, arguments.threads, arguments.every, arguments.streams, arguments.stream_tokens) < 1:
        raise BenchError("--rounds, --threads, --every, --streams and --stream-tokens must be at least 1")
    if len(set(arguments.lengths)) < len(arguments.lengths):
        raise BenchError("--lengths must be different numbers")
    if not (4 <= arguments.before <= _ANSWER_TOKENS // 4 and 4 <= arguments.measured <= _ANSWER_TOKENS // 2):
        raise BenchError(
            f"--before must be from 4 to {_ANSWER_TOKENS // 4}, and --measured from 4 to {_ANSWER_TOKENS // 2}"
        )


def _max_tokens(arguments: argparse.Namespace) -> int:
    return int(max(*arguments.lengths, arguments.stream_tokens, _WARM_UP_TOKENS) + _ANSWER_TOKENS)


def _pair(way: str, arguments: argparse.Namespace, maker: PairMaker) -> Pair:
    streams = arguments.streams * (arguments.stream_tokens + _ANSWER_TOKENS)
    settings = {"migration": {"checkpoint_tokens": arguments.every if way == WITH else 0}}
    # Checkpoints take half of the host's pool at most, so the pool is twice the KV cache.
    return maker.make(way, max(_max_tokens(arguments), streams), settings, host_copies=2)


class _Bench:
    """All rounds, once the workers are ready."""

    def __init__(self, arguments: argparse.Namespace, pairs: dict[str, Pair], tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.deaths: list[Death] = []
        self.decodings: list[Decoding] = []
        self._pairs = pairs
        self._arguments = arguments
        self._requests = Requests(arguments.seed)

    async def run(self) -> None:
        """Raises: BenchError."""
        rounds = self._arguments.rounds
        for way in WAYS:
            self.tell(f"{way}: warming up")
            await self._die(way, _WARM_UP_TOKENS, -1)
        for number in range(rounds):
            ways = WAYS if number % 2 else (WITH, WITHOUT)
            for way in ways:
                self.tell(f"round {number + 1} of {rounds}: without a death, {way}")
                self.decodings += await self._decode(way, number)
            for length in self._arguments.lengths:
                killed = []
                for way in ways:
                    self.tell(f"round {number + 1} of {rounds}: {length} tokens, {way}")
                    killed.append(await self._die(way, length, number))
                self.tell(f"round {number + 1} of {rounds}: {length} tokens, without a death")
                num_tokens = min(len(request.token_ids) for request in killed)
                expected = await undisturbed_tokens(self._pairs[WITHOUT], self._subject(length, number), num_tokens)
                require_tokens(expected, ((request.name, request.token_ids) for request in killed))
                self.deaths += [request.death for request in killed]

    async def _die(self, way: str, length: int, number: int) -> _Killed:
        pair, arguments = self._pairs[way], self._arguments
        pair.order_checkpoints()
        before = await pair.fresh_reports()
        subject = pair.open(self._subject(length, number), SOURCE)
        if way == WITH:
            num_blocks = length // before[SOURCE].tokens_per_block
            checkpoint_bytes = num_blocks * before[SOURCE].bytes_per_block if length >= arguments.every else 0
            await pair.until_checkpointed(before[SOURCE].checkpointed_bytes + checkpoint_bytes)
        await pair.until_made([subject], len(subject.times_s) + arguments.before)
        killed_s, noticed_s = await pair.kill(SOURCE)
        num_before = sum(at_s <= noticed_s for at_s in subject.times_s)
        await pair.until_made([subject], num_before + _AFTER_TOKENS)
        await pair.wait_met()
        after = await pair.fresh_reports()
        token_ids = subject.token_ids[: num_before + _AFTER_TOKENS]
        await pair.end_all()
        return _Killed(
            Death(
                length,
                way,
                noticed_s - killed_s,
                subject.times_s[num_before] - noticed_s,
                after[DESTINATION].num_tokens_looked_up == before[DESTINATION].num_tokens_looked_up,
            ),
            token_ids,
        )

    async def _decode(self, way: str, number: int) -> list[Decoding]:
        pair, arguments = self._pairs[way], self._arguments
        pair.order_checkpoints()
        before = await pair.fresh_reports()
        streams = {
            side: [
                pair.open(self._request(f"{side}-{number}-{place}", arguments.stream_tokens), side)
                for place in range(arguments.streams)
            ]
            for side in _SIDES
        }
        all_streams = [stream for of_side in streams.values() for stream in of_side]
        await pair.until_made(all_streams, 1)
        if way == WITH and arguments.stream_tokens >= arguments.every:  # the prompts' KV is not a steady cost
            num_blocks = arguments.streams * (arguments.stream_tokens // before[SOURCE].tokens_per_block)
            num_bytes = num_blocks * before[SOURCE].bytes_per_block
            await pair.until_checkpointed(before[SOURCE].checkpointed_bytes + num_bytes)
        begun = (await pair.fresh_reports())[SOURCE].checkpointed_bytes
        cpu_s = {side: _cpu_s(pair.pid(side)) for side in _SIDES}
        num_before = {stream.request_id: len(stream.times_s) for stream in all_streams}
        from_s = max(stream.times_s[-1] for stream in all_streams)
        for stream in all_streams:
            await pair.until_made([stream], num_before[stream.request_id] + arguments.measured)
        cpu_s = {side: _cpu_s(pair.pid(side)) - cpu_s[side] for side in _SIDES}
        num_tokens = {
            side: sum(len(stream.times_s) - num_before[stream.request_id] for stream in streams[side])
            for side in _SIDES
        }
        until_s = min(stream.times_s[-1] for stream in all_streams)
        num_bytes = (await pair.fresh_reports())[SOURCE].checkpointed_bytes - begun
        await pair.end_all()
        return [
            Decoding(
                way,
                name,
                tokens_per_s(streams[side], from_s, until_s),
                cpu_s[side] / num_tokens[side],
                num_bytes if side == SOURCE else 0,
            )
            for side, name in _SIDES.items()
        ]

    def _subject(self, length: int, number: int) -> RequestSpec:
        return self._request(f"subject-{number}-{length}", length)

    def _request(self, name: str, num_tokens: int) -> RequestSpec:
        return self._requests.make(name, num_tokens, _ANSWER_TOKENS)


def tokens_per_s(streams: Iterable[Stream], from_s: float, until_s: float) -> float:
    """The tokens of all streams between two times, per second."""
    return sum(from_s < at_s <= until_s for stream in streams for at_s in stream.times_s) / (until_s - from_s)


def _cpu_s(pid: int) -> float:
    """Raises: BenchError."""
    try:
        return processes.cpu_s(pid)
    except OSError:
        raise BenchError("a worker has ended") from None


def _of_way(deaths: Sequence[Death], length: int) -> dict[str, list[Death]]:
    return {way: [death for death in deaths if (death.context_tokens, death.way) == (length, way)] for way in WAYS}


def _of_side(decodings: Sequence[Decoding], side: str) -> dict[str, list[Decoding]]:
    return {way: [decoding for decoding in decodings if (decoding.way, decoding.side) == (way, side)] for way in WAYS}


def tables_of(deaths: Sequence[Death], decodings: Sequence[Decoding]) -> list[FigureTable]:
    pauses = []
    for length in dict.fromkeys(death.context_tokens for death in deaths):
        of_way = _of_way(deaths, length)
        pause_ms = {way: Figure.of([1e3 * death.pause_s for death in of_way[way]]) for way in WAYS}
        detection_s = Figure.of([death.detection_s for way in WAYS for death in of_way[way]])
        ratio = Figure(pause_ms[WITHOUT].median / pause_ms[WITH].median)
        pauses.append(Row(f"{length:,} tokens", (*(pause_ms[way] for way in WAYS), ratio, detection_s)))
    costs = []
    for side in _SIDES.values():
        decoded = _of_side(decodings, side)
        rates = (Figure.of([decoding.tokens_per_s for decoding in decoded[way]]) for way in WAYS)
        cpu_ms = (Figure.of([1e3 * decoding.cpu_s for decoding in decoded[way]]) for way in WAYS)
        costs.append(Row(side, (*rates, *cpu_ms)))
    ways = (f"{way} checkpoints" for way in WAYS)
    return [
        FigureTable(
            PAUSES,
            "context",
            (*(Column(way, "ms") for way in ways), Column("ratio", "x", 1), Column("death noticed after", "s", 2)),
            tuple(pauses),
        ),
        FigureTable(
            COSTS,
            "worker",
            (*(Column(way, "tokens/s") for way in WAYS), *(Column(f"{way}, CPU", "ms", 2) for way in WAYS)),
            tuple(costs),
        ),
    ]


def show(deaths: Sequence[Death], decodings: Sequence[Decoding], console: Console) -> None:
    """Print for a person."""
    table = Table(
        *("context", "without, ms", "with, ms", "ratio", "continued from KV", "noticed after, s"),
        title=PAUSES,
        title_justify="left",
    )
    for length in dict.fromkeys(death.context_tokens for death in deaths):
        of_way = _of_way(deaths, length)
        pause_s = {way: median(death.pause_s for death in of_way[way]) for way in WAYS}
        table.add_row(
            f"{length:,}",
            *(f"{pause_s[way] * 1e3:.0f}" for way in WAYS),
            f"{pause_s[WITHOUT] / pause_s[WITH]:.1f}",
            f"{sum(death.has_adopted for death in of_way[WITH])}/{len(of_way[WITH])}",
            f"{median(death.detection_s for way in WAYS for death in of_way[way]):.2f}",
        )
    print_table(console, table, first_numeric=0)
    table = Table(
        *("worker", "without, tokens/s", "with, tokens/s", "ratio", "without, CPU ms", "with, CPU ms", "ratio"),
        title=COSTS,
        title_justify="left",
    )
    for side in _SIDES.values():
        decoded = _of_side(decodings, side)
        rates = {way: median(decoding.tokens_per_s for decoding in decoded[way]) for way in WAYS}
        cpu_s = {way: median(decoding.cpu_s for decoding in decoded[way]) for way in WAYS}
        table.add_row(
            side,
            *(f"{rates[way]:.1f}" for way in WAYS),
            f"{rates[WITH] / rates[WITHOUT]:.3f}",
            *(f"{cpu_s[way] * 1e3:.2f}" for way in WAYS),
            f"{cpu_s[WITH] / cpu_s[WITHOUT]:.3f}" if cpu_s[WITHOUT] else "",  # too short to be measured
        )
    print_table(console, table, first_numeric=0)
    copied = median(
        decoding.checkpointed_bytes for decoding in decodings if (decoding.way, decoding.side) == (WITH, "source")
    )
    say(console, f"checkpoints copied {copied / 2**20:.1f} MiB meanwhile")

"""``tools/bench checkpoints``: what a worker's death costs a running request, with and without KV checkpoints.

Each way has two workers of its own on this machine, and takes a turn in each round. A request decodes on the source,
which is killed (kill -9); the pause is from where the gateway notices that until the destination's first token. The
tokens must be those of the same request where nobody dies, or there is no figure. What checkpoints cost while nothing
dies is the time that both workers take for the tokens of many requests. The model is that of ``tools/bench migration``.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import uvloop
from rich.console import Console
from rich.table import Table

from actorserve.core.messages import RequestSpec, SamplingParams
from actorserve.host import available_memory_bytes
from actorserve.processes import launch
from actorserve.settings import load_settings
from tools.benchmarks.engine import counts
from tools.benchmarks.errors import BenchError
from tools.benchmarks.machine import machine_line, this_machine
from tools.benchmarks.migration import ID_RANGE, MODEL_NAME, SHAPE, kv_bytes_per_token
from tools.benchmarks.migration_pair import DESTINATION, SOURCE, Pair, Stream, with_workers
from tools.benchmarks.prompts import prompt_token_ids
from tools.benchmarks.report import write_json

WITHOUT, WITH = WAYS = ("without", "with")
_SIDES = {SOURCE: "source", DESTINATION: "guardian"}
_ROOM_TOKENS = 2048  # that a request may make; more than any measurement takes
_WARM_UP_TOKENS = 64
_AFTER_TOKENS = 8  # made at the destination before a measurement ends


@dataclass(frozen=True, slots=True)
class Death:
    """A subject of ``context_tokens`` lost its worker. ``detection_s``: until the gateway noticed; ``pause_s``: from
    there to the next token. ``has_adopted``: the destination went on from checkpoints.
    """

    context_tokens: int
    way: str
    detection_s: float
    pause_s: float
    has_adopted: bool


@dataclass(frozen=True, slots=True)
class Decoding:
    """What one side's requests got while nothing died. ``cpu_s``: of its worker, for each token."""

    way: str
    side: str
    tokens_per_s: float
    cpu_s: float
    checkpointed_bytes: int


@dataclass(frozen=True, slots=True)
class _Killed:
    """A death, and what the subject's client got."""

    death: Death
    token_ids: list[int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", type=counts, default=(1024, 4096, 8192), metavar="N,N", help="prompts of the subject, in tokens"
    )
    parser.add_argument("--rounds", type=int, default=5, help="each way and length has a turn in each (%(default)s)")
    parser.add_argument("--every", type=int, default=64, help="tokens between checkpoints (%(default)s)")
    parser.add_argument("--before", type=int, default=24, help="tokens that are made before the death (%(default)s)")
    parser.add_argument("--streams", type=int, default=4, help="on each side while nothing dies (%(default)s)")
    parser.add_argument("--stream-tokens", type=int, default=512, help="their prompts (%(default)s)")
    parser.add_argument("--measured", type=int, default=256, help="tokens of each of them (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each worker (%(default)s)")
    parser.add_argument("--dtype", default="int8", choices=("int8", "int4", "bfloat16"), help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed, the same requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--engine", default="torch", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: ActorserveError, KeyboardInterrupt."""
    _check(arguments)
    console, machine = Console(), this_machine()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        model = folder / MODEL_NAME
        model.mkdir()
        shape = SHAPE | {"max_position_embeddings": _max_tokens(arguments)}
        (model / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        pairs = {way: _pair(way, arguments, model, folder / way, stack) for way in WAYS}
        with console.status("") as status:
            bench = _Bench(arguments, pairs, status.update)
            load_before = os.getloadavg()[0]
            uvloop.run(_until_interrupted(bench))
    _say(console, f"two workers of {arguments.threads} thread(s) on {machine_line(machine)}")
    _say(console, f"load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after")
    what = f"medians of {arguments.rounds} rounds; checkpoints every {arguments.every} tokens"
    _say(console, f"{what}; no death changed a token")
    show(bench.deaths, bench.decodings, console)
    if arguments.json is not None:
        told = {"machine": asdict(machine), "load_average": [load_before, os.getloadavg()[0]], "model": shape}
        told |= {"deaths": [asdict(each) for each in bench.deaths]}
        write_json(told | {"decodings": [asdict(each) for each in bench.decodings]}, arguments.json)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if min(arguments.rounds, arguments.threads, arguments.every, arguments.streams, arguments.stream_tokens) < 1:
        raise BenchError("--rounds, --threads, --every, --streams and --stream-tokens must be at least 1")
    if len(set(arguments.lengths)) < len(arguments.lengths):
        raise BenchError("--lengths must be different numbers")
    if not (4 <= arguments.before <= _ROOM_TOKENS // 4 and 4 <= arguments.measured <= _ROOM_TOKENS // 2):
        raise BenchError(
            f"--before must be from 4 to {_ROOM_TOKENS // 4}, and --measured from 4 to {_ROOM_TOKENS // 2}"
        )


def _max_tokens(arguments: argparse.Namespace) -> int:
    return int(max(*arguments.lengths, arguments.stream_tokens, _WARM_UP_TOKENS) + _ROOM_TOKENS)


def _pair(way: str, arguments: argparse.Namespace, model: Path, folder: Path, stack: ExitStack) -> Pair:
    folder.mkdir()
    streams = arguments.streams * (arguments.stream_tokens + _ROOM_TOKENS)
    kv_tokens = max(_max_tokens(arguments), streams) * 3 // 2  # nobody has to give way
    kv_bytes = kv_tokens * kv_bytes_per_token(arguments.engine)
    settings = load_settings(
        None,
        {
            "model": {"path": str(model), "load_format": "dummy", "dtype": arguments.dtype},
            "workers": {
                "count": 2,
                "device": "cpu",
                "engine": arguments.engine,
                "threads": arguments.threads,
                "memory_bytes": max(1, available_memory_bytes() // (2 * len(WAYS))),
                "kv_cache_bytes": kv_bytes,
                "host_kv_bytes": 2 * kv_bytes,  # half of it is left to swapping
                "max_context_tokens": _max_tokens(arguments),
            },
            "migration": {"checkpoint_tokens": arguments.every if way == WITH else 0},
        },
    )
    resolved, placement = launch.resolve_workers(settings)
    runtime_dir = stack.enter_context(launch.runtime_dir(resolved))
    return Pair(way, resolved, placement, runtime_dir)


async def _until_interrupted(bench: "_Bench") -> None:
    """Do it, and end all processes, also where that is asked for before the time."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await with_workers(bench.pairs.values(), bench.run, bench.tell, max_restarts=10**6)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


class _Bench:
    """All rounds, once the workers are there."""

    def __init__(self, arguments: argparse.Namespace, pairs: dict[str, Pair], tell: Callable[[str], None]) -> None:
        self.pairs = pairs
        self.tell = tell
        self.deaths: list[Death] = []
        self.decodings: list[Decoding] = []
        self._arguments = arguments
        self._numbers = itertools.count()

    async def run(self) -> None:
        """Raises: BenchError."""
        rounds = self._arguments.rounds
        for way in WAYS:
            self.tell(f"{way}: warming up")
            await self._die(way, _WARM_UP_TOKENS, -1)
        for number in range(rounds):
            ways = WAYS if number % 2 else (WITH, WITHOUT)
            for way in ways:
                self.tell(f"round {number + 1} of {rounds}: nobody dies, {way}")
                self.decodings += await self._decode(way, number)
            for length in self._arguments.lengths:
                killed = []
                for way in ways:
                    self.tell(f"round {number + 1} of {rounds}: {length} tokens, {way}")
                    killed.append(await self._die(way, length, number))
                self.tell(f"round {number + 1} of {rounds}: {length} tokens, and nobody dies")
                num_tokens = min(len(each.token_ids) for each in killed)
                require_tokens(await self._undisturbed(length, number, num_tokens), killed)
                self.deaths += [each.death for each in killed]

    async def _die(self, way: str, length: int, number: int) -> _Killed:
        pair, arguments = self.pairs[way], self._arguments
        pair.order_guard()
        before = await pair.fresh_reports()
        subject = pair.open(self._request(f"subject-{number}-{length}", length), SOURCE)
        if way == WITH:
            num_blocks = length // before[SOURCE].tokens_per_block
            guarded_bytes = num_blocks * before[SOURCE].bytes_per_block if length >= arguments.every else 0
            await pair.until_checkpointed(before[SOURCE].checkpointed_bytes + guarded_bytes)
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

    async def _undisturbed(self, length: int, number: int, num_tokens: int) -> list[int]:
        """The tokens of the same request where nobody dies. Raises: BenchError."""
        pair = self.pairs[WITHOUT]
        subject = pair.open(self._request(f"subject-{number}-{length}", length), SOURCE)
        await pair.until_made([subject], num_tokens)
        await pair.end_all()
        return subject.token_ids[:num_tokens]

    async def _decode(self, way: str, number: int) -> list[Decoding]:
        pair, arguments = self.pairs[way], self._arguments
        pair.order_guard()
        before = await pair.fresh_reports()
        streams = {
            side: [
                pair.open(self._request(f"{side}-{number}-{each}", arguments.stream_tokens), side)
                for each in range(arguments.streams)
            ]
            for side in _SIDES
        }
        everybody = [stream for each in streams.values() for stream in each]
        await pair.until_made(everybody, 1)
        if way == WITH and arguments.stream_tokens >= arguments.every:  # their prompts' KV is no steady cost
            num_blocks = arguments.streams * (arguments.stream_tokens // before[SOURCE].tokens_per_block)
            num_bytes = num_blocks * before[SOURCE].bytes_per_block
            await pair.until_checkpointed(before[SOURCE].checkpointed_bytes + num_bytes)
        begun = (await pair.fresh_reports())[SOURCE].checkpointed_bytes
        cpu_s = {side: _cpu_s(pair.pid(side)) for side in _SIDES}
        num_before = {stream.request_id: len(stream.times_s) for stream in everybody}
        from_s = max(stream.times_s[-1] for stream in everybody)
        for stream in everybody:
            await pair.until_made([stream], num_before[stream.request_id] + arguments.measured)
        cpu_s = {side: _cpu_s(pair.pid(side)) - cpu_s[side] for side in _SIDES}
        num_tokens = {
            side: sum(len(each.times_s) - num_before[each.request_id] for each in streams[side]) for side in _SIDES
        }
        until_s = min(stream.times_s[-1] for stream in everybody)
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

    def _request(self, name: str, num_tokens: int) -> RequestSpec:
        rng = random.Random(f"{self._arguments.seed} {name}")
        prompt = prompt_token_ids(num_tokens, ID_RANGE, rng)
        sampling = SamplingParams(seed=rng.randrange(2**32), max_tokens=_ROOM_TOKENS - 1)
        return RequestSpec(f"{name}-{next(self._numbers)}", tuple(prompt), sampling)


def tokens_per_s(streams: Iterable[Stream], from_s: float, until_s: float) -> float:
    """What all these got between two times."""
    return sum(from_s < at_s <= until_s for stream in streams for at_s in stream.times_s) / (until_s - from_s)


def _cpu_s(pid: int) -> float:
    """CPU time that a process has taken, all its threads. Raises: BenchError."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        raise BenchError("a worker has ended") from None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def require_tokens(expected: Sequence[int], killed: Sequence[_Killed]) -> None:
    """Raises: BenchError, where a subject whose worker died did not get the tokens that it gets where nobody dies."""
    for each in killed:
        if tuple(each.token_ids[: len(expected)]) != tuple(expected):
            death = each.death
            raise BenchError(f"{death.way} checkpoints: a request of {death.context_tokens} tokens got other tokens")


def show(deaths: Sequence[Death], decodings: Sequence[Decoding], console: Console) -> None:
    """Print for a person."""
    table = Table(
        *("context", "without, ms", "with, ms", "ratio", "went on from KV", "noticed after, s"),
        title="from where the gateway notices a worker's death to the next token",
        title_justify="left",
    )
    for length in dict.fromkeys(each.context_tokens for each in deaths):
        ways = {way: [each for each in deaths if (each.context_tokens, each.way) == (length, way)] for way in WAYS}
        pause_s = {way: median(each.pause_s for each in ways[way]) for way in WAYS}
        table.add_row(
            f"{length:,}",
            *(f"{pause_s[way] * 1e3:.0f}" for way in WAYS),
            f"{pause_s[WITHOUT] / pause_s[WITH]:.1f}",
            f"{sum(each.has_adopted for each in ways[WITH])}/{len(ways[WITH])}",
            f"{median(each.detection_s for way in WAYS for each in ways[way]):.2f}",
        )
    _print(table, console)
    table = Table(
        *("worker", "without, tokens/s", "with, tokens/s", "ratio", "without, CPU ms", "with, CPU ms", "ratio"),
        title="while nobody dies: decode throughput, and CPU time a token",
        title_justify="left",
    )
    for side in _SIDES.values():
        of_side = {way: [each for each in decodings if (each.way, each.side) == (way, side)] for way in WAYS}
        rates = {way: median(each.tokens_per_s for each in of_side[way]) for way in WAYS}
        cpu_s = {way: median(each.cpu_s for each in of_side[way]) for way in WAYS}
        table.add_row(
            side,
            *(f"{rates[way]:.1f}" for way in WAYS),
            f"{rates[WITH] / rates[WITHOUT]:.3f}",
            *(f"{cpu_s[way] * 1e3:.2f}" for way in WAYS),
            f"{cpu_s[WITH] / cpu_s[WITHOUT]:.3f}" if cpu_s[WITHOUT] else "",  # too short to be measured
        )
    _print(table, console)
    copied = median(each.checkpointed_bytes for each in decodings if (each.way, each.side) == (WITH, "source"))
    _say(console, f"checkpoints copied {copied / 2**20:.1f} MiB meanwhile")


def _print(table: Table, console: Console) -> None:
    for column in table.columns:
        column.justify = "right"
    console.print(table)


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)

"""``tools/bench soak``: random chats for an hour, a third of which hang up, on two gateways and two workers.

Every chat has one right answer, and half of the chats were asked before, so a wrong answer is found. The KV cache is
small enough to be full after the warm-up, so that memory which grows later is a leak.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Final

import httpx
from rich.console import Console

from actorserve.errors import ActorserveError
from actorserve.model_files.locate import locate
from tools.benchmarks.common.arguments import add_json, add_model, count, positive
from tools.benchmarks.common.console import print_figures, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.serving.client import served_model
from tools.benchmarks.serving.servers import RunningServer, our_server
from tools.benchmarks.soak.chats import Chats
from tools.benchmarks.soak.processes import Watch, process_ids
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

TITLE = "Own memory under random chats"
COUNTS_TITLE = "Random chats"
_MIB: Final = 2**20
_IDLE_TIMEOUT_S: Final = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=positive, default=60.0, help="how long (%(default)s)")
    parser.add_argument(
        "--warm-up-minutes", type=positive, default=10.0, help="memory may grow for so long (%(default)s)"
    )
    parser.add_argument("--chats-per-s", type=positive, default=1.0, help="chats that begin a second (%(default)s)")
    parser.add_argument("--cancelled", type=float, default=1 / 3, help="share of the chats that hang up (a third)")
    parser.add_argument("--gateways", type=count, default=2, help="(%(default)s)")
    parser.add_argument("--workers", type=count, default=2, help="(%(default)s)")
    parser.add_argument("--dtype", default="int8", help="numeric mode of the engine (%(default)s)")
    parser.add_argument("--kv-cache-mib", type=count, default=64, help="KV cache of each worker (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the chats (%(default)s)")
    add_model(parser)
    add_json(parser)


def _config(arguments: argparse.Namespace) -> str:
    return (
        f"[http]\ngateways = {arguments.gateways}\n"
        f"[workers]\nthreads = 1\nkv_cache_bytes = {arguments.kv_cache_mib * _MIB}\n"
    )


async def _left_over(url: str) -> str:
    """What the server still holds after all chats have ended; empty if it becomes idle in time."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    held: dict[str, float] = {}
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        for _ in range(int(_IDLE_TIMEOUT_S)):
            lines = (await client.get("/metrics")).text.splitlines()
            held = {line.partition(" ")[0]: float(line.split()[-1]) for line in lines if line.startswith(names)}
            if not any(held.values()):
                return ""
            await asyncio.sleep(1.0)
    return ", ".join(f"{name} {value:g}" for name, value in held.items() if value)


async def _drive(chats: Chats, watch: Watch, seconds: float, url: str) -> str:
    """Returns what was left over."""
    sampling = asyncio.create_task(watch.keep_sampling())
    try:
        await chats.run(seconds)
    finally:
        sampling.cancel()
    watch.sample()
    return await _left_over(url)


async def _model(url: str) -> str:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        return await served_model(client)


def tables_of(chats: Chats, watch: Watch, warm_up_s: float, left_over: str) -> list[FigureTable]:
    """Raises: BenchError if a process of the server has ended."""
    end_s = watch.times_s[-1]
    rows = []
    for name in watch.ids:
        warm, last = watch.used_at(name, warm_up_s), watch.used_at(name, end_s)
        growth = 100 * (last / warm - 1)
        rows.append(Row(name, (Figure(warm / _MIB), Figure(last / _MIB), Figure(growth))))
    columns = (
        Column(f"after {warm_up_s / 60:g} min", "MiB", 1),
        Column(f"after {end_s / 60:.0f} min", "MiB", 1),
        Column("growth", "%", 2),
    )
    outcomes = chats.outcomes
    counts = {
        "finished": outcomes.finished,
        "hung up by their clients": outcomes.cancelled,
        "errors": outcomes.errors.total(),
        "answers that differ from the same question's first answer": outcomes.differing,
        "requests or KV left at the end": int(bool(left_over)),
    }
    number = Column("number", "", 0)
    return [
        FigureTable(COUNTS_TITLE, "chats", (number,), tuple(Row(name, (Figure(n),)) for name, n in counts.items())),
        FigureTable(TITLE, "process", columns, tuple(rows)),
    ]


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Returns 1 if a chat failed. Raises: BenchError."""
    if arguments.warm_up_minutes >= arguments.minutes:
        raise BenchError("--warm-up-minutes must be less than --minutes")
    if not 0.0 <= arguments.cancelled <= 1.0:
        raise BenchError("--cancelled must be from 0 to 1")
    console, machine = Console(), this_machine()
    say(console, machine_line(machine))
    try:
        model = str(locate(arguments.model))
    except ActorserveError as error:
        raise BenchError(str(error)) from None
    names = ("coordinator", *(f"gateway-{n}" for n in range(arguments.gateways)))
    names += tuple(f"worker-{n}" for n in range(arguments.workers))
    with tempfile.TemporaryDirectory(prefix="actorserve-") as folder:
        config = Path(folder) / "actorserve.toml"
        config.write_text(_config(arguments), encoding="utf-8")
        spec = our_server(model, arguments.dtype, arguments.workers, config)
        with RunningServer(spec) as server:
            server.first_token_s()
            chats = Chats(
                server.url,
                asyncio.run(_model(server.url)),
                arguments.seed,
                per_s=arguments.chats_per_s,
                cancelled_share=arguments.cancelled,
            )
            watch = Watch(process_ids(server.pid, names))
            with console.status(f"chats for {arguments.minutes:g} minutes"):
                left_over = asyncio.run(_drive(chats, watch, arguments.minutes * 60, server.url))
            cpu = watch.cpu_share()
    tables = tables_of(chats, watch, arguments.warm_up_minutes * 60, left_over)
    for table in tables:
        print_figures(console, table)
    say(console, f"{100 * cpu:.0f} % of a core, {chats.outcomes.output_tokens} output tokens")
    for line in (*chats.outcomes.examples, *([f"left over: {left_over}"] if left_over else [])):
        say(console, line)
    details = {
        "cpu_share": cpu,
        "output_tokens": chats.outcomes.output_tokens,
        "errors": dict(chats.outcomes.errors),
        "examples": chats.outcomes.examples,
        "left_over": left_over,
        "times_s": [round(at_s) for at_s in watch.times_s[::6]],
        "used_mib": {name: [round(each / _MIB, 1) for each in taken[::6]] for name, taken in watch.used_bytes.items()},
    }
    save_figures(arguments, tables, details, machine)
    return 1 if chats.outcomes.errors or chats.outcomes.differing or left_over else 0

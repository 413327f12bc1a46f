"""``tools/bench serve --peer llama-server``: our server and llama-server under the same load, in turns and in one run.

The measurement starts the servers itself, all of them, and drives one at a time. A turn has a seed, and so prompts, of
its own, the same for everyone: a prompt cache helps nobody beyond the few tokens with which every chat begins.
"""

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from actorserve.errors import ActorserveError
from actorserve.model_files.locate import locate
from tools.benchmarks import formats
from tools.benchmarks.errors import BenchError
from tools.benchmarks.machine import machine_line, this_machine
from tools.benchmarks.peers import build
from tools.benchmarks.report import write_json
from tools.benchmarks.serve import make_arrivals, measure_once
from tools.benchmarks.servers import RunningServer, ServerSpec, llama_server, our_server
from tools.benchmarks.statistics import Report

CONCURRENCY = 16
REQUESTS = 48
_TEMPLATE_TOKENS = 64  # room for what the chat template adds


@dataclass(frozen=True, slots=True)
class Served:
    """One server's figures: medians over its turns."""

    name: str
    tokens_per_s: float
    ttft_s: float
    tpot_s: float
    prompt_tokens: int
    output_tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("--peer", "starts our server and llama-server, and measures both in turns")
    group.add_argument("--peer", choices=("llama-server",), help="what tools/bench peers has built")
    group.add_argument("--serve-model", default="default", metavar="GGUF", help="what all serve (%(default)s)")
    group.add_argument("--dtype", default="int8", help="of our server (%(default)s)")
    group.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="of our server, each in turn (1 2)")
    group.add_argument("--formats", nargs="*", default=list(formats.FORMATS), help="llama-server's, beside the file's")
    group.add_argument("--rounds", type=int, default=3, help="turns of each server; medians are shown (%(default)s)")


def specs(arguments: argparse.Namespace, num_slots: int, slot_tokens: int) -> list[ServerSpec]:
    """Ours first. Raises: BenchError."""
    built = build.find_build()
    if built is None:
        raise BenchError(f"llama-server is not here: {build.ADVICE}")
    try:
        model = locate(arguments.serve_model)
    except ActorserveError as error:
        raise BenchError(str(error)) from None
    if model.is_dir():
        raise BenchError(f"llama-server reads GGUF files, and {model} is none")
    files = {"same file": model} | {name: formats.converted(model, name, built) for name in arguments.formats}
    num_threads = this_machine().cores
    return [our_server(str(model), arguments.dtype, count) for count in arguments.workers] + [
        llama_server(name, file, built, num_threads, num_slots, slot_tokens) for name, file in files.items()
    ]


def summarize(name: str, reports: Sequence[Report]) -> Served:
    """Raises: BenchError, where a request failed or nothing came."""
    for report in reports:
        if report.errors or report.num_unfinished:
            raise BenchError(f"{name}: requests failed: {report.errors or 'some did not end'}")
    means = [
        (ttft.mean, tpot.mean)
        for report in reports
        if (ttft := report.latencies_s["ttft"]) is not None and (tpot := report.latencies_s["tpot"]) is not None
    ]
    if not means:
        raise BenchError(f"{name}: no answer had two tokens, so there is nothing to compare")
    return Served(
        name,
        statistics.median(report.output_tokens_per_s for report in reports),
        statistics.median(ttft for ttft, _ in means),
        statistics.median(tpot for _, tpot in means),
        sum(report.prompt_tokens for report in reports),
        sum(report.output_tokens for report in reports),
    )


def show(results: Sequence[Served], console: Console) -> None:
    """The last column: tokens per second over the best peer's."""
    best = max((each.tokens_per_s for each in results if each.name.startswith("llama")), default=None)
    table = Table("server", "output tokens/s", "mean TTFT, s", "mean TPOT, ms", "times llama-server's best")
    for column in table.columns[1:]:
        column.justify = "right"
    for each in results:
        ratio = "" if best is None else f"{each.tokens_per_s / best:.2f}"
        table.add_row(each.name, f"{each.tokens_per_s:.0f}", f"{each.ttft_s:.2f}", f"{each.tpot_s * 1e3:.0f}", ratio)
    console.print(table)
    if len({(each.prompt_tokens, each.output_tokens) for each in results}) > 1:
        counts = ", ".join(f"{each.name}: {each.prompt_tokens} and {each.output_tokens}" for each in results)
        console.print(f"not the same numbers of prompt and output tokens: {counts}", soft_wrap=True)


def turn(arguments: argparse.Namespace, url: str, number: int) -> argparse.Namespace:
    """The arguments of one turn: at its server, with its seed, and with the load that is usual where none was given."""
    changed: dict[str, Any] = {
        "url": url,
        "model": None,
        "seed": arguments.seed * 1000 + number,
        "concurrency": arguments.concurrency or CONCURRENCY,
        "requests": arguments.requests or REQUESTS,
        "warmup": 0,  # each server has given a token already, and a prompt that comes twice would be cached
    }
    return argparse.Namespace(**(vars(arguments) | changed))


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    if arguments.rate is not None or arguments.trace is not None:
        raise BenchError("--peer measures a closed loop: no --rate and no --trace")
    console = Console()
    machine = this_machine()
    longest = max(each.prompt_tokens + each.output_tokens for each in make_arrivals(turn(arguments, "", 0)))
    # A prompt's length is told in words, of which a few are several tokens.
    wanted = specs(arguments, arguments.concurrency or CONCURRENCY, round(1.25 * longest) + _TEMPLATE_TOKENS)
    reports: dict[str, list[Report]] = {spec.name: [] for spec in wanted}
    with ExitStack() as processes:
        servers = [processes.enter_context(RunningServer(spec)) for spec in wanted]
        for server in servers:
            server.first_token_s()
        for number in range(arguments.rounds):
            first = number % len(servers)
            for server in (*servers[first:], *servers[:first]):
                measured = asyncio.run(measure_once(turn(arguments, server.url, number), console))
                if measured.stopped:
                    raise KeyboardInterrupt
                reports[server.spec.name].append(measured.report)
    results = [summarize(name, each) for name, each in reports.items()]
    console.print(
        f"{arguments.concurrency or CONCURRENCY} chats at once, {arguments.requests or REQUESTS} a turn, "
        f"{arguments.rounds} turns; servers and client on {machine_line(machine)}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    show(results, console)
    if arguments.json is not None:
        write_json({"machine": asdict(machine), "servers": [asdict(each) for each in results]}, arguments.json)
    return 0

"""``tools/bench serve --peer llama-server``: our server and llama-server under the same load, in turns and in one run.

The measurement starts all servers, and drives one at a time. Each turn has a seed and prompts of its own, the same for
every server, so a prompt cache holds no more than the few tokens with which every chat begins.
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from actorserve.errors import ActorserveError
from actorserve.model_files.locate import locate
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.engine import formats
from tools.benchmarks.peers import llama_build
from tools.benchmarks.serving.one_server import make_arrivals, measure_once
from tools.benchmarks.serving.servers import RunningServer, ServerSpec, llama_server, our_server
from tools.benchmarks.serving.statistics import Report
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

TITLE = "Chats at once"
CONCURRENCY = 16
REQUESTS = 48
_TEMPLATE_TOKENS = 64  # the most that the chat template adds


@dataclass(frozen=True, slots=True)
class Served:
    """One server's figures over its turns."""

    name: str
    tokens_per_s: Figure
    ttft_s: Figure
    tpot_ms: Figure
    prompt_tokens: int
    output_tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("--peer", "starts our server and llama-server, and measures both in turns")
    group.add_argument(
        "--peer", choices=("llama-server",), help="the server to compare with; tools/bench peers builds it"
    )
    group.add_argument(
        "--serve-model", default="default", metavar="GGUF", help="the model that all servers serve (%(default)s)"
    )
    group.add_argument("--dtype", default="int8", help="numeric mode of our server (%(default)s)")
    group.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=[1, 2],
        help="numbers of our server's workers; a server for each (1 2)",
    )
    group.add_argument(
        "--formats",
        nargs="*",
        default=list(formats.FORMATS),
        help="llama-server's formats in addition to the file's own",
    )
    group.add_argument("--rounds", type=int, default=3, help="turns of each server; medians are shown (%(default)s)")


def specs(arguments: argparse.Namespace, num_slots: int, slot_tokens: int) -> list[ServerSpec]:
    """The servers, ours first. Raises: BenchError."""
    built = llama_build.find_build()
    if built is None:
        raise BenchError(f"llama-server is not built: {llama_build.ADVICE}")
    try:
        model = locate(arguments.serve_model)
    except ActorserveError as error:
        raise BenchError(str(error)) from None
    if model.is_dir():
        raise BenchError(f"llama-server reads GGUF files, and {model} is a folder")
    files = {"same file": model} | {name: formats.converted(model, name, built) for name in arguments.formats}
    num_threads = this_machine().cores
    return [our_server(str(model), arguments.dtype, count) for count in arguments.workers] + [
        llama_server(name, file, built, num_threads, num_slots, slot_tokens) for name, file in files.items()
    ]


def summarize(name: str, reports: Sequence[Report]) -> Served:
    """Raises: BenchError, if a request failed or no answer had two tokens."""
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
        Figure.of([report.output_tokens_per_s for report in reports]),
        Figure.of([ttft for ttft, _ in means]),
        Figure.of([1e3 * tpot for _, tpot in means]),
        sum(report.prompt_tokens for report in reports),
        sum(report.output_tokens for report in reports),
    )


def show(results: Sequence[Served], console: Console) -> None:
    """The last column is tokens per second over the best peer's."""
    best = max((served.tokens_per_s.median for served in results if served.name.startswith("llama")), default=None)
    table = Table("server", "output tokens/s", "mean TTFT, s", "mean TPOT, ms", "times llama-server's best")
    for served in results:
        rate, ttft, tpot = (figure.median for figure in (served.tokens_per_s, served.ttft_s, served.tpot_ms))
        ratio = "" if best is None else f"{rate / best:.2f}"
        table.add_row(served.name, f"{rate:.0f}", f"{ttft:.2f}", f"{tpot:.0f}", ratio)
    print_table(console, table)
    if len({(served.prompt_tokens, served.output_tokens) for served in results}) > 1:
        counts = ", ".join(f"{served.name}: {served.prompt_tokens} and {served.output_tokens}" for served in results)
        say(console, f"servers counted different numbers of prompt and output tokens: {counts}")


def table_of(results: Sequence[Served], concurrency: int, sampling: str = "") -> FigureTable:
    columns = (Column("output", "tokens/s", 0), Column("mean TTFT", "s", 2), Column("mean TPOT", "ms", 0))
    rows = tuple(Row(served.name, (served.tokens_per_s, served.ttft_s, served.tpot_ms)) for served in results)
    return FigureTable(f"{concurrency} {TITLE.lower()}{sampling}", "server", columns, rows)


def sampling_of(arguments: argparse.Namespace) -> str:
    """How tokens are chosen, for a title."""
    if arguments.temperature == 0.0:
        return ", greedy"
    limits = f", top_p {arguments.top_p:g}" if arguments.top_p < 1.0 else ""
    limits += f", top_k {arguments.top_k}" if arguments.top_k > 0 else ""
    return f", temperature {arguments.temperature:g}{limits}"


def turn(arguments: argparse.Namespace, url: str, number: int) -> argparse.Namespace:
    """The arguments of one turn: its server, its seed, and the default load if none was given."""
    changed: dict[str, Any] = {
        "url": url,
        "model": None,
        "seed": arguments.seed * 1000 + number,
        "concurrency": arguments.concurrency or CONCURRENCY,
        "requests": arguments.requests or REQUESTS,
        "warmup": 0,  # each server has given a token already, and a repeated prompt would be cached
    }
    return argparse.Namespace(**(vars(arguments) | changed))


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    if arguments.rate is not None or arguments.trace is not None:
        raise BenchError("--peer measures a closed loop: no --rate and no --trace")
    console = Console()
    machine = this_machine()
    concurrency = arguments.concurrency or CONCURRENCY
    longest = max(arrival.prompt_tokens + arrival.output_tokens for arrival in make_arrivals(turn(arguments, "", 0)))
    # A prompt's length is counted in words, and a few words are several tokens.
    wanted = specs(arguments, concurrency, round(1.25 * longest) + _TEMPLATE_TOKENS)
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
    results = [summarize(name, turns) for name, turns in reports.items()]
    load = f"{concurrency} chats at once{sampling_of(arguments)}"
    turns = f"{arguments.requests or REQUESTS} a turn, {arguments.rounds} turns"
    say(console, f"{load}, {turns}; servers and client on {machine_line(machine)}")
    show(results, console)
    save_figures(arguments, [table_of(results, concurrency, sampling_of(arguments))], machine=machine)
    return 0

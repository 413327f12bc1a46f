"""Drive a running server, and report latencies and throughput as its clients see them."""

import argparse
import asyncio
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from actorserve.sim.workload import lengths
from actorserve.sim.workload.requests import Arrival, independent, replayed, synthetic
from actorserve.sim.workload.traces import read_trace
from tools.benchmarks.common.arguments import add_json, count, positive
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.common.prompts import prompt_text, prompt_token_ids
from tools.benchmarks.serving.client import measure, served_model
from tools.benchmarks.serving.drive import Drive, Job, until_stopped
from tools.benchmarks.serving.report import details_of, show, table_of
from tools.benchmarks.serving.statistics import Outcome, Report, make_report
from tools.figures.machine import this_machine

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
EXIT_ERRORS = 1
EXIT_INTERRUPTED = 130


def _token_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not 0 <= int(low) < int(high):
        raise argparse.ArgumentTypeError("must be LOW:HIGH with 0 <= LOW < HIGH")
    return int(low), int(high)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (%(default)s)")
    parser.add_argument("--model", help="the model to ask for (the server's first)")
    parser.add_argument("--api", choices=tuple(_PATHS), default="chat", help="chat, or completions with token ids")
    parser.add_argument("--requests", type=count, metavar="N", help="how many (100; with --trace: all of the trace)")
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--rate", type=positive, metavar="PER_S", help="open loop: Poisson arrivals (1 per second)")
    loop.add_argument("--concurrency", type=count, metavar="N", help="closed loop: N requests at once")
    parser.add_argument("--prompt-tokens", default="100", metavar="LENGTHS", help=f"{lengths.HELP} (%(default)s)")
    parser.add_argument(
        "--output-tokens",
        default="64",
        metavar="LENGTHS",
        help="likewise, and every answer has exactly that length (%(default)s)",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="CSV", help="Azure's format; its arrivals, unless a loop is given"
    )
    parser.add_argument(
        "--time-scale", type=positive, default=1.0, help="factor of a trace's times; 0.5 is twice as fast"
    )
    parser.add_argument("--max-tokens", type=count, help="cut a trace's requests to this many tokens in all")
    parser.add_argument(
        "--token-range", type=_token_range, default=(1000, 30000), metavar="LOW:HIGH", help="prompts' token ids"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="sampling temperature; 0 is greedy (%(default)s, the API's)"
    )
    parser.add_argument("--top-p", type=positive, default=1.0, help="sample from this share of the probability (1.0)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K best tokens (0: all)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the workload: the same seed gives the same requests"
    )
    parser.add_argument("--warmup", type=int, default=1, metavar="N", help="requests before measuring (%(default)s)")
    parser.add_argument(
        "--timeout", type=positive, default=600.0, metavar="S", help="a request fails if no data arrives for so long"
    )
    add_json(parser)


def make_arrivals(arguments: argparse.Namespace) -> list[Arrival]:
    """The workload that the arguments describe. Raises: BenchError, WorkloadError."""
    if arguments.trace is None:
        closed = arguments.concurrency is not None
        return synthetic(
            independent(
                lengths.parse_lengths(arguments.prompt_tokens),
                lengths.parse_lengths(arguments.output_tokens),
            ),
            arguments.requests or 100,
            None if closed else arguments.rate or 1.0,
            arguments.seed,
        )
    rows = read_trace(arguments.trace, arguments.requests)
    return replayed(
        rows,
        arguments.rate,
        arguments.concurrency is not None,
        arguments.time_scale,
        arguments.max_tokens,
        arguments.seed,
    )


def make_body(arrival: Arrival, arguments: argparse.Namespace, model: str, rng: random.Random) -> dict[str, Any]:
    """A streaming request whose output has exactly the arrival's length."""
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": arrival.output_tokens,
        "min_tokens": arrival.output_tokens,
        "ignore_eos": True,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "top_k": arguments.top_k,  # said always, because llama-server samples from 40 unless told otherwise
        "min_p": 0.0,  # likewise, and llama-server drops tokens below a twentieth of the best
        "seed": rng.randrange(2**31),
    }
    if arguments.api == "chat":
        body["messages"] = [{"role": "user", "content": prompt_text(arrival.prompt_tokens, rng)}]
    else:
        body["prompt"] = prompt_token_ids(arrival.prompt_tokens, arguments.token_range, rng)
    return body


def make_jobs(arrivals: Sequence[Arrival], arguments: argparse.Namespace, model: str) -> list[Job]:
    """Requests ready to be sent. A request depends on the seed and on its number alone."""
    return [
        Job(arrival.at_s, make_body(arrival, arguments, model, random.Random(f"{arguments.seed} request {number}")))
        for number, arrival in enumerate(arrivals)
    ]


@dataclass(frozen=True, slots=True)
class Measured:
    """``stopped``: Ctrl-C ended the measurement early, so the report covers a part of the workload."""

    model: str
    report: Report
    stopped: bool


async def measure_once(arguments: argparse.Namespace, console: Console) -> Measured:
    """Drive the workload once. Raises: BenchError."""
    arrivals = make_arrivals(arguments)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    timeout = httpx.Timeout(arguments.timeout, connect=10.0)
    try:
        client = httpx.AsyncClient(base_url=arguments.url, timeout=timeout, limits=limits, trust_env=False)
    except (httpx.InvalidURL, ValueError) as error:
        raise BenchError(f"--url {arguments.url}: {error}") from None
    async with client:
        model = arguments.model or await served_model(client)
        jobs = make_jobs(arrivals, arguments, model)
        path = _PATHS[arguments.api]
        for job in jobs[: arguments.warmup]:
            warm = await measure(client, path, job.body)
            if warm.error is not None:
                raise BenchError(f"the first request failed: {warm.error}")
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGINT, stop.set
        )  # from here on there are outcomes to print
        outcomes, stopped = await send_jobs(client, path, jobs, arguments.concurrency, stop, console)
    return Measured(model, make_report(outcomes, time.perf_counter()), stopped)


async def send_jobs(
    client: httpx.AsyncClient,
    path: str,
    jobs: Sequence[Job],
    concurrency: int | None,
    stop: asyncio.Event,
    console: Console,
) -> tuple[list[Outcome], bool]:
    """Send all jobs under a progress bar. Returns their outcomes, and whether Ctrl-C stopped the measurement."""
    progress = Progress(
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[errors]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with progress:
        bar = progress.add_task("requests", total=len(jobs), errors="")
        failed = 0

        def on_end(outcome: Outcome) -> None:
            nonlocal failed
            failed += outcome.error is not None
            progress.update(bar, advance=1, errors=f"{failed} failed" if failed else "")

        drive = Drive(client, path, on_end)
        work = drive.open_loop(jobs) if concurrency is None else drive.closed_loop(jobs, concurrency)
        stopped = await until_stopped(work, stop)
    return drive.outcomes, stopped


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Returns the exit status: 1 if requests failed, 130 if Ctrl-C stopped the measurement.

    Raises: BenchError.
    """
    console = Console()
    measured = asyncio.run(measure_once(arguments, console))
    workload = {
        **{name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()},
        "model": measured.model,
        "interrupted": measured.stopped,
    }
    for name in ("run", "command_line"):
        workload.pop(name, None)
    machine = this_machine()
    show(measured.report, machine, workload, console)
    save_figures(arguments, [table_of(measured.report)], details_of(measured.report, workload), machine)
    if measured.stopped:
        return EXIT_INTERRUPTED
    return EXIT_ERRORS if measured.report.errors else 0

"""``tools/bench batching``: output of a whole server of ours, and of other engines' continuous batching, in one run.

All serve the same requests, with the same random prompts of token ids, to a model of random weights. Ours answers over
HTTP with all that a server does; the others run in a process without a server. They take the GPU one after another,
because each takes all of its memory.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import torch
from rich.console import Console
from rich.table import Table

from tools.benchmarks.common.answers import ask, read_answer
from tools.benchmarks.common.arguments import add_json, count
from tools.benchmarks.common.children import running
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.common.prompts import prompt_token_ids
from tools.benchmarks.gpu.batch_peer import Generate
from tools.benchmarks.gpu.device import Device
from tools.benchmarks.gpu.shapes import SHAPES, write_shape, write_tokenizer
from tools.benchmarks.serving.client import served_model
from tools.benchmarks.serving.servers import RunningServer, ServerSpec
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine
from workers.cuda_version import why_no_cuda

TITLE = "Requests at once, ours over HTTP and other engines in their own processes"
OURS = "actorserve"
_ANSWER_TIMEOUT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b", help="the model, with random weights")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the command")
    parser.add_argument("--threads", type=int, help="CPU threads of the others, on a CPU (all cores)")
    parser.add_argument("--requests", type=count, default=64, help="requests at once (%(default)s)")
    parser.add_argument("--prompt-tokens", type=count, default=512, help="of each request (%(default)s)")
    parser.add_argument("--output-tokens", type=count, default=256, help="of each request (%(default)s)")
    parser.add_argument("--rounds", type=count, default=3, help="runs of each engine; medians are shown (%(default)s)")
    parser.add_argument("--vllm-python", type=Path, metavar="FILE", help="the Python of an environment that has vLLM")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise BenchError(f"torch finds no CUDA device: {why_no_cuda()}")
    console = Console()
    machine = this_machine(gpu=Device(arguments.device).gpu)
    threads = arguments.threads or machine.cores
    speeds: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_shape(arguments.shape, Path(scratch))
        write_tokenizer(arguments.shape, folder)
        say(console, f"{arguments.shape} with random weights; {machine_line(machine)}")
        peer = [str(folder), arguments.device, str(threads)]
        engines: dict[str, Callable[[], AbstractContextManager[Generate]]] = {
            OURS: lambda: _ours(folder, arguments.device),
            "transformers, continuous batching": lambda: _other(sys.executable, "transformers", peer),
        }
        if arguments.vllm_python is None:
            say(console, "without vLLM: --vllm-python names the Python of an environment that has it")
        else:
            engines["vLLM"] = lambda: _other(str(arguments.vllm_python), "vllm", peer)
        for name, start in engines.items():
            try:
                with start() as generate:
                    speeds[name] = measure(generate, arguments)
            except BenchError as error:
                if name == OURS:
                    raise
                say(console, f"without {name}: {error}")
                continue
            say(console, f"{name}: {speeds[name].median:.0f} output tokens/s")
    table = table_of(speeds, arguments)
    _show(table, console)
    save_figures(arguments, [table], {"shape": arguments.shape, "device": arguments.device}, machine)
    return 0


def measure(generate: Generate, arguments: argparse.Namespace) -> Figure:
    """Output tokens per second. The first run warms up, and each run has prompts of its own. Raises: BenchError."""
    vocabulary = SHAPES[arguments.shape]["vocab_size"]
    rates = []
    for number in range(arguments.rounds + 1):
        rng = random.Random(number)
        prompts = [prompt_token_ids(arguments.prompt_tokens, (100, vocabulary), rng) for _ in range(arguments.requests)]
        seconds = generate(prompts, arguments.output_tokens)
        if number:
            rates.append(arguments.requests * arguments.output_tokens / seconds)
    return Figure.of(rates)


def table_of(speeds: dict[str, Figure], arguments: argparse.Namespace) -> FigureTable:
    rows = tuple(
        Row(name, (speed, None if name == OURS else Figure(speeds[OURS].median / speed.median)))
        for name, speed in speeds.items()
    )
    load = f"{arguments.requests} with {arguments.prompt_tokens} prompt and {arguments.output_tokens} output tokens"
    return FigureTable(
        f"{TITLE}: {load}", "engine", (Column("output", "tokens/s", 0), Column("ours over it", "x", 2)), rows
    )


@contextmanager
def _ours(folder: Path, device: str) -> Iterator[Generate]:
    """One server with one worker, on all of the device. Raises: BenchError."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    command = (
        *(sys.executable, "-P", "-m", "actorserve", "serve", "--model", str(folder), "--load-format", "dummy"),
        *("--device", device, "--dtype", dtype, "--workers", "1", "--port", "{port}"),
    )
    with RunningServer(ServerSpec(OURS, command)) as server:
        server.first_token_s()

        def generate(prompts: list[list[int]], num_output: int) -> float:
            return asyncio.run(_ask_all(server.url, prompts, num_output))

        yield generate


async def _ask_all(url: str, prompts: list[list[int]], num_output: int) -> float:
    """Send all requests at once. Returns the seconds until the last has its answer. Raises: BenchError."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_ANSWER_TIMEOUT_S, limits=limits, trust_env=False) as client:
        body = {
            "model": await served_model(client),
            "max_tokens": num_output,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        began = time.perf_counter()
        try:
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json={"prompt": prompt, **body}) for prompt in prompts)
            )
            seconds = time.perf_counter() - began
            made = {answer.raise_for_status().json()["usage"]["completion_tokens"] for answer in answers}
        except httpx.HTTPError as error:
            raise BenchError(f"a request to {OURS} failed: {error}") from None
    if made != {num_output}:
        raise BenchError(f"answers of {OURS} have {made} tokens instead of {num_output}")
    return seconds


@contextmanager
def _other(python: str, name: str, options: list[str]) -> Iterator[Generate]:
    """Another engine in its own process. Raises: BenchError."""
    command = [python, "-m", "tools.benchmarks.gpu.batch_peer", name, *options]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        running(command, errors) as process,
    ):
        read_answer(process, errors, name)

        def generate(prompts: list[list[int]], num_output: int) -> float:
            return float(ask(process, errors, name, {"prompts": prompts, "num_output": num_output})["seconds"])

        yield generate


def _show(table: FigureTable, console: Console) -> None:
    shown = Table("engine", "output tokens/s", "ours over it")
    for row in table.rows:
        rate, ratio = row.cells
        assert rate is not None
        shown.add_row(row.name, f"{rate.median:.0f}", "" if ratio is None else f"{ratio.median:.2f}x")
    print_table(console, shown)

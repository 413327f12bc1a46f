"""One worker of ours with a small KV pool, and loads that are shares of what the worker can serve."""

import argparse
import asyncio
import json
import random
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from rich.console import Console

from actorserve.settings import load_settings
from actorserve.sim.workload.lengths import HELP, parse_lengths
from actorserve.sim.workload.requests import Arrival, LengthPairs, cut, independent, synthetic
from tools.benchmarks.common.arguments import add_json, add_model
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.paths import ROOT
from tools.benchmarks.common.prompts import prompt_token_ids
from tools.benchmarks.serving.client import served_model
from tools.benchmarks.serving.drive import Job
from tools.benchmarks.serving.one_server import send_jobs
from tools.benchmarks.serving.servers import ServerSpec
from tools.benchmarks.serving.statistics import Outcome
from tools.figures.machine import this_machine

PATH = "/v1/completions"
_ID_RANGE = (1000, 30000)
_TIMEOUT_S = 600.0
_REPORTED_AFTER_S = 0.5  # longer than the time between two load reports

Overrides = dict[str, dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser, *, requests: int, prompts: str, outputs: str, loads: str) -> None:
    add_model(parser)
    parser.add_argument("--dtype", default="int8", help="numeric mode of the worker (%(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads of the worker (all cores except one)")
    parser.add_argument("--kv-mib", type=float, default=48.0, help="KV cache of the worker (%(default)s)")
    parser.add_argument(
        "--host-kv-mib", type=float, default=192.0, help="host memory that the worker may swap KV to (%(default)s)"
    )
    parser.add_argument("--prompt-tokens", default=prompts, metavar="LENGTHS", help=f"{HELP} (%(default)s)")
    parser.add_argument(
        "--output-tokens",
        default=outputs,
        metavar="LENGTHS",
        help="likewise, and every answer has exactly that length (%(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=1536, help="longer requests are cut to this length (%(default)s)"
    )
    parser.add_argument(
        "--loads",
        type=shares,
        default=shares(loads),
        metavar="X,X",
        help=f"shares of the tokens/s at saturation ({loads})",
    )
    parser.add_argument(
        "--requests", type=int, default=requests, metavar="N", help="requests of each measurement (%(default)s)"
    )
    parser.add_argument(
        "--concurrency", type=int, default=24, help="requests at once in the closed loop that saturates (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same requests")
    add_json(parser)
    parser.add_argument("--engine", default="torch", help=argparse.SUPPRESS)


def shares(text: str) -> tuple[float, ...]:
    values = tuple(float(share) for share in text.split(","))
    if not all(0.0 < share < float("inf") for share in values):
        raise argparse.ArgumentTypeError("must be positive numbers with commas between them")
    return values


def overrides(arguments: argparse.Namespace, policy: str, swap: str) -> Overrides:
    """The settings of a server that differ from the defaults. Raises: SettingsError, for invalid values."""
    values: Overrides = {
        "model": {"path": arguments.model, "dtype": arguments.dtype},
        "workers": {
            "count": 1,
            "device": "cpu",
            "engine": arguments.engine,
            "threads": arguments.threads or max(1, this_machine().cores - 1),
            "kv_cache_bytes": round(arguments.kv_mib * 2**20),
            "host_kv_bytes": round(arguments.host_kv_mib * 2**20),
            "max_context_tokens": arguments.max_tokens,
            "policy": policy,
            "swap": swap,
        },
    }
    load_settings(None, values)
    return values


def server_spec(name: str, values: Mapping[str, Mapping[str, Any]], folder: Path) -> ServerSpec:
    """A server with these settings, which are written to a file in ``folder``."""
    file = folder / f"{name.replace(':', '-')}.toml"
    tables = (
        f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for section, table in values.items()
    )
    file.write_text("\n".join(tables), encoding="utf-8")
    return ServerSpec(name, (str(ROOT / "tools" / "serve"), "--config", str(file), "--port", "{port}"))


def length_pairs(arguments: argparse.Namespace) -> LengthPairs:
    """Raises: WorkloadError."""
    pairs = independent(parse_lengths(arguments.prompt_tokens), parse_lengths(arguments.output_tokens))
    return lambda rng: cut(*pairs(rng), arguments.max_tokens)


def make_jobs(arrivals: Sequence[Arrival], seed: str, salt: str = "") -> list[Job]:
    """Requests ready to be sent, greedy, and with answers of exactly the drawn length.

    A prompt depends on the seed, the request's number and its prefix.
    """
    jobs = []
    for number, arrival in enumerate(arrivals):
        shared = min(arrival.prefix_tokens, arrival.prompt_tokens)
        prompt = prompt_token_ids(shared, _ID_RANGE, random.Random(f"{seed} prefix {arrival.prefix}"))
        own = arrival.prompt_tokens - shared
        prompt += prompt_token_ids(own, _ID_RANGE, random.Random(f"{seed} request {number}"))
        body = {
            "prompt": prompt,
            "max_tokens": arrival.output_tokens,
            "min_tokens": arrival.output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"cache_salt": salt} if salt else {}),
        }
        jobs.append(Job(arrival.at_s, body))
    return jobs


def send(url: str, jobs: Sequence[Job], concurrency: int | None, console: Console) -> list[Outcome]:
    """Send all jobs, at their times or ``concurrency`` at once, and wait for the answers.

    Raises: BenchError, if a request fails, because the other latencies then mean nothing. KeyboardInterrupt.
    """
    outcomes = asyncio.run(_send(url, jobs, concurrency, console))
    errors = sorted({outcome.error or "one did not end" for outcome in outcomes if outcome.ended_s is None})
    if errors:
        raise BenchError(f"requests failed: {', '.join(errors)}")
    return outcomes


async def _send(url: str, jobs: Sequence[Job], concurrency: int | None, console: Console) -> list[Outcome]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits, trust_env=False) as client:
        model = await served_model(client)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
        named = [Job(job.at_s, job.body | {"model": model}) for job in jobs]
        outcomes, stopped = await send_jobs(client, PATH, named, concurrency, stop, console)
        if stopped:
            raise KeyboardInterrupt
        await asyncio.sleep(_REPORTED_AFTER_S)
    return outcomes


def saturated_tokens_per_s(outcomes: Sequence[Outcome]) -> float:
    """Output tokens per second of a closed loop until its last request was sent. Then fewer and fewer requests run.

    Requests per second would be too high, because short requests end first. Raises: BenchError, if all requests were
    sent at once.
    """
    begun_s, last_s = (pick(outcome.sent_s for outcome in outcomes) for pick in (min, max))
    num_tokens = 0.0
    for outcome in outcomes:
        by_then = sum(at_s <= last_s for at_s in outcome.chunk_times_s)
        num_tokens += outcome.output_tokens * by_then / max(1, len(outcome.chunk_times_s))
    if num_tokens == 0.0 or last_s <= begun_s:
        raise BenchError("--requests must be more than --concurrency, or nothing is saturated")
    return num_tokens / (last_s - begun_s)


def poisson_arrivals(pairs: LengthPairs, count: int, output_tokens_per_s: float, seed: int) -> list[Arrival]:
    """Requests at the rate at which the lengths of their answers sum up to ``output_tokens_per_s``."""
    mean = fmean(arrival.output_tokens for arrival in synthetic(pairs, count, None, seed))
    return synthetic(pairs, count, output_tokens_per_s / mean, seed)


def counters(url: str, names: Sequence[str]) -> dict[str, float]:
    """Metrics of a server, summed over its instances. Raises: BenchError."""
    try:
        text = httpx.get(f"{url}/metrics", timeout=_TIMEOUT_S, trust_env=False).raise_for_status().text
    except httpx.HTTPError as error:
        raise BenchError(f"{url} does not show its metrics: {type(error).__name__}") from None
    return {name: sum_of(text, name) for name in names}


def sum_of(page: str, name: str) -> float:
    """A metric of a page in Prometheus's text format, summed over its labels. Raises: BenchError, if it is missing."""
    values = [float(line.split()[-1]) for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    if not values:
        raise BenchError(f"the server shows no metric {name}")
    return sum(values)

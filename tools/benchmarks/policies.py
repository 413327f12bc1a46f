"""``tools/bench policies``: scheduling policies side by side on the real engine, in turns and in one run.

Each has a server of its own, with one worker on the CPU and the same small KV pool. First all are saturated by a closed
loop; the slowest's tokens per second are what loads are shares of. Then they take turns, at each load with the same
Poisson arrivals for everyone, and another one begins each round. Latencies are the client's, over HTTP on the same
machine.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from actorserve.sim.results import summary
from actorserve.sim.workload import LengthPairs, synthetic
from tools.benchmarks import under_load
from tools.benchmarks.machine import machine_line, this_machine
from tools.benchmarks.report import write_json
from tools.benchmarks.servers import RunningServer
from tools.benchmarks.statistics import Outcome
from tools.benchmarks.under_load import counters, make_jobs, poisson_arrivals, saturated_tokens_per_s, send, server_spec

_LATENCIES = {"per_token_s": "s per token", "ttft_s": "s TTFT", "e2e_s": "s E2E"}
_COUNTERS = {
    "preemptions": ("preemptions", "vllm:num_preemptions_total"),
    "swap_outs": ("swap-outs", "actorserve_swap_outs_total"),
    "swap_blocked_s": ("s delayed by copies", "actorserve_swap_blocked_seconds_total"),
}
_METRICS = tuple(metric for _, metric in _COUNTERS.values())

Figures = dict[str, dict[str, float]]
"""Of each latency its mean and percentiles."""


@dataclass
class Measured:
    """One policy at one load, over all rounds; ``counts`` are the server's."""

    outcomes: list[Outcome] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)

    def add(self, outcomes: Sequence[Outcome], before: Mapping[str, float], after: Mapping[str, float]) -> None:
        self.outcomes += outcomes
        for name, (_, metric) in _COUNTERS.items():
            self.counts[name] = self.counts.get(name, 0.0) + after[metric] - before[metric]


@dataclass(frozen=True, slots=True)
class Load:
    """What all policies met at one load. ``ratios``: the first policy's figures over each other's."""

    load: float
    output_tokens_per_s: float
    latency: dict[str, Figures]
    counts: dict[str, dict[str, float]]
    ratios: dict[str, Figures]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policies",
        type=_arms,
        default=_arms("skip_join_mlfq,fcfs"),
        metavar="A,B",
        help="the first is compared with each other one (skip_join_mlfq,fcfs); A:recompute is A with that swap mode",
    )
    parser.add_argument("--rounds", type=int, default=3, help="everyone takes a turn in each (%(default)s)")
    # As ShareGPT's single turns, without their longest answers.
    prompts, outputs = "lognormal-mean:161:1.2:1024", "lognormal-mean:338:1.0:1024"
    under_load.add_arguments(parser, requests=60, prompts=prompts, outputs=outputs, loads="0.5,0.7,0.9")


def _arms(text: str) -> tuple[str, ...]:
    arms = tuple(text.split(","))
    if len(set(arms)) < len(arms) or not all(arms):
        raise argparse.ArgumentTypeError("must be different names with commas between them")
    return arms


def latencies(outcomes: Sequence[Outcome]) -> Figures:
    """``per_token_s`` is FastServe's per-token latency: E2E over all output tokens."""
    values = {
        "per_token_s": [e2e_s / each.output_tokens for each in outcomes if (e2e_s := each.e2e_s) is not None],
        "ttft_s": [ttft_s for each in outcomes if (ttft_s := each.ttft_s) is not None],
        "e2e_s": [e2e_s for each in outcomes if (e2e_s := each.e2e_s) is not None],
    }
    return {name: found for name, each in values.items() if (found := summary(each)) is not None}


def compare(load: float, output_tokens_per_s: float, measured: Mapping[str, Measured]) -> Load:
    """The first of ``measured`` with each other one."""
    latency = {arm: latencies(each.outcomes) for arm, each in measured.items()}
    first, *others = latency
    ratios = {
        f"{first} / {other}": {
            name: {key: value / latency[other][name][key] for key, value in figures.items()}
            for name, figures in latency[first].items()
        }
        for other in others
    }
    return Load(load, output_tokens_per_s, latency, {arm: each.counts for arm, each in measured.items()}, ratios)


def show(result: Load, console: Console) -> None:
    table = Table(
        "",
        *result.latency,
        *result.ratios,
        title=f"{100 * result.load:.0f} % of saturation: {result.output_tokens_per_s:.0f} output tokens/s",
        title_justify="left",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name, title in _LATENCIES.items():
        for key in ("mean", "p95"):
            figures = [f"{each[name][key]:.3f}" for each in result.latency.values()]
            compared = [f"{each[name][key]:.2f}" for each in result.ratios.values()]
            table.add_row(f"{title}, {key.replace('p', 'P')}", *figures, *compared)
    for name, (title, _) in _COUNTERS.items():
        table.add_row(title, *(f"{each[name]:.{2 if name.endswith('_s') else 0}f}" for each in result.counts.values()))
    console.print(table)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: ActorserveError."""
    console = Console()
    machine = this_machine()
    pairs = under_load.length_pairs(arguments)
    settings = {arm: under_load.overrides(arguments, *_parts(arm)) for arm in arguments.policies}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        servers = {
            arm: stack.enter_context(RunningServer(server_spec(arm, values, folder)))
            for arm, values in settings.items()
        }
        for server in servers.values():
            server.first_token_s()
        rates = {arm: _saturate(arguments, pairs, server.url, console) for arm, server in servers.items()}
        loads = [_measure(arguments, pairs, share, min(rates.values()), servers, console) for share in arguments.loads]
    _tell(console, f"one worker and its clients on {machine_line(machine)}")
    saturated = ", ".join(f"{arm} {rate:.0f}" for arm, rate in rates.items())
    _tell(console, f"output tokens/s of a closed loop of {arguments.concurrency}: {saturated}")
    _tell(console, f"{arguments.rounds} rounds of {arguments.requests} requests at each load")
    for load in loads:
        show(load, console)
    if arguments.json is not None:
        figures = {"saturation_tokens_per_s": rates, "loads": [asdict(load) for load in loads]}
        write_json({"machine": asdict(machine), "settings": settings, **figures}, arguments.json)
    return 0


def _parts(arm: str) -> tuple[str, str]:
    policy, _, swap = arm.partition(":")
    return policy, swap or "proactive"


def _saturate(arguments: argparse.Namespace, pairs: LengthPairs, url: str, console: Console) -> float:
    jobs = make_jobs(synthetic(pairs, arguments.requests, None, arguments.seed), f"{arguments.seed} saturation")
    return saturated_tokens_per_s(send(url, jobs, arguments.concurrency, console))


def _measure(
    arguments: argparse.Namespace,
    pairs: LengthPairs,
    share: float,
    saturation: float,
    servers: Mapping[str, RunningServer],
    console: Console,
) -> Load:
    measured = {arm: Measured() for arm in servers}
    arms: list[str] = list(servers)
    for number in range(arguments.rounds):
        arrivals = poisson_arrivals(pairs, arguments.requests, share * saturation, arguments.seed + 1 + number)
        jobs = make_jobs(arrivals, f"{arguments.seed} {share} {number}")
        first = number % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            url = servers[arm].url
            before = counters(url, _METRICS)
            outcomes = send(url, jobs, None, console)
            measured[arm].add(outcomes, before, counters(url, _METRICS))
    return compare(share, share * saturation, measured)


def _tell(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)

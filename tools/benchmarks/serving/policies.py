"""``tools/bench policies``: scheduling policies side by side on the real engine, in turns and in one run.

Each policy has a server of its own, with one worker on the CPU and the same small KV pool. A closed loop saturates each
server first; loads are shares of the slowest server's tokens per second. Then the servers take turns, at each load with
the same Poisson arrivals, and another server begins each round. Latencies are the client's, over HTTP on the same
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
from actorserve.sim.workload.requests import LengthPairs, synthetic
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.serving import under_load
from tools.benchmarks.serving.servers import RunningServer
from tools.benchmarks.serving.statistics import Outcome
from tools.benchmarks.serving.under_load import (
    counters,
    make_jobs,
    poisson_arrivals,
    saturated_tokens_per_s,
    send,
    server_spec,
)
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

_LATENCIES = {"per_token_s": "latency per token, s", "ttft_s": "TTFT, s", "e2e_s": "E2E, s"}
_COUNTERS = {
    "preemptions": ("preemptions", "vllm:num_preemptions_total"),
    "swap_outs": ("swap-outs", "actorserve_swap_outs_total"),
    "swap_blocked_s": ("s waiting for copies", "actorserve_swap_blocked_seconds_total"),
}
_METRICS = tuple(metric for _, metric in _COUNTERS.values())

Latencies = dict[str, dict[str, float]]
"""Mean and percentiles of each latency."""


@dataclass
class Measured:
    """One arm at one load, over all rounds; ``counts`` are the server's counters."""

    outcomes: list[Outcome] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)

    def add(self, outcomes: Sequence[Outcome], before: Mapping[str, float], after: Mapping[str, float]) -> None:
        self.outcomes += outcomes
        for name, (_, metric) in _COUNTERS.items():
            self.counts[name] = self.counts.get(name, 0.0) + after[metric] - before[metric]


@dataclass(frozen=True, slots=True)
class Load:
    """All arms at one load. ``ratios`` are the first arm's latencies over those of each other arm."""

    load: float
    output_tokens_per_s: float
    latency: dict[str, Latencies]
    counts: dict[str, dict[str, float]]
    ratios: dict[str, Latencies]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policies",
        type=_arms,
        default=_arms("skip_join_mlfq,fcfs"),
        metavar="A,B",
        help="the first is compared with each other policy (skip_join_mlfq,fcfs); A:recompute is A with that swap mode",
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds in which each policy has a turn (%(default)s)")
    # Like ShareGPT's single turns, without their longest answers.
    prompts, outputs = "lognormal-mean:161:1.2:1024", "lognormal-mean:338:1.0:1024"
    under_load.add_arguments(parser, requests=60, prompts=prompts, outputs=outputs, loads="0.5,0.7,0.9")


def _arms(text: str) -> tuple[str, ...]:
    arms = tuple(text.split(","))
    if len(set(arms)) < len(arms) or not all(arms):
        raise argparse.ArgumentTypeError("must be different names with commas between them")
    return arms


def latencies(outcomes: Sequence[Outcome]) -> Latencies:
    """``per_token_s`` is FastServe's per-token latency: E2E over all output tokens."""
    values = {
        "per_token_s": [e2e_s / outcome.output_tokens for outcome in outcomes if (e2e_s := outcome.e2e_s) is not None],
        "ttft_s": [ttft_s for outcome in outcomes if (ttft_s := outcome.ttft_s) is not None],
        "e2e_s": [e2e_s for outcome in outcomes if (e2e_s := outcome.e2e_s) is not None],
    }
    return {name: found for name, times_s in values.items() if (found := summary(times_s)) is not None}


def compare(load: float, output_tokens_per_s: float, measured: Mapping[str, Measured]) -> Load:
    """Compare the first arm of ``measured`` with each other arm."""
    latency = {arm: latencies(measurement.outcomes) for arm, measurement in measured.items()}
    first, *others = latency
    ratios = {
        f"{first} / {other}": {
            name: {key: value / latency[other][name][key] for key, value in figures.items()}
            for name, figures in latency[first].items()
        }
        for other in others
    }
    return Load(
        load, output_tokens_per_s, latency, {arm: measurement.counts for arm, measurement in measured.items()}, ratios
    )


def show(result: Load, console: Console) -> None:
    table = Table(
        "",
        *result.latency,
        *result.ratios,
        title=f"{100 * result.load:.0f} % of saturation: {result.output_tokens_per_s:.0f} output tokens/s",
        title_justify="left",
    )
    for name, title in _LATENCIES.items():
        for key in ("mean", "p95"):
            figures = [f"{latencies[name][key]:.3f}" for latencies in result.latency.values()]
            compared = [f"{ratios[name][key]:.2f}" for ratios in result.ratios.values()]
            table.add_row(f"{title}, {key.replace('p', 'P')}", *figures, *compared)
    for name, (title, _) in _COUNTERS.items():
        table.add_row(
            title, *(f"{counts[name]:.{2 if name.endswith('_s') else 0}f}" for counts in result.counts.values())
        )
    print_table(console, table)


def table_of(result: Load, rounds: int) -> FigureTable:
    columns = (*(Column(arm) for arm in result.latency), *(Column(name, "x", 2) for name in result.ratios))
    rows = []
    for name, title in _LATENCIES.items():
        for key in ("mean", "p95"):
            cells = [Figure(latency[name][key], rounds=rounds) for latency in result.latency.values()]
            cells += [Figure(ratio[name][key], rounds=rounds) for ratio in result.ratios.values()]
            rows.append(Row(f"{title}, {key.replace('p', 'P')}", tuple(cells)))
    for name, (title, _) in _COUNTERS.items():
        counted = (Figure(counts[name], rounds=rounds) for counts in result.counts.values())
        rows.append(Row(title, (*counted, *(None for _ in result.ratios))))
    offered = Figure(result.output_tokens_per_s, rounds=rounds)
    rows.append(Row("offered output tokens/s", (*(offered for _ in result.latency), *(None for _ in result.ratios))))
    return FigureTable(load_title(result.load), "", columns, tuple(rows))


def load_title(load: float) -> str:
    return f"Scheduling policies at {100 * load:.0f} % of saturation"


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
    say(console, f"one worker and its clients on {machine_line(machine)}")
    saturated = ", ".join(f"{arm} {rate:.0f}" for arm, rate in rates.items())
    say(console, f"output tokens/s of a closed loop of {arguments.concurrency}: {saturated}")
    say(console, f"{arguments.rounds} rounds of {arguments.requests} requests at each load")
    for load in loads:
        show(load, console)
    details = {"saturation_tokens_per_s": rates, "settings": settings, "loads": [asdict(load) for load in loads]}
    save_figures(arguments, [table_of(load, arguments.rounds) for load in loads], details, machine)
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

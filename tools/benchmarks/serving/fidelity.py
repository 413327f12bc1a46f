"""``tools/bench fidelity``: the simulator against the real engine, on the same arrivals and a fresh profile.

Both sides are measured at the gateway's core: a request arrives with its ``Open``, and its tokens and its end arrive
with the worker's messages. The simulator runs the same core, and a real server's journal (``cluster.journal_dir``)
holds the messages of its core with their times. So both figures include placing, the cluster's queue and the worker,
and neither includes client, HTTP and tokenizing.

Two times that are not in a profile are measured beforehand, on a server of their own: the time of one message (single
requests on an idle cluster), and the time between two iterations (the closed loop that measures saturation). Each
load has a fresh server, because the simulated cluster is fresh, too. Requests begin with one of a few texts. Token ids
differ between the two sides, but prompts share prefixes in the same way, and only that matters to the prefix cache.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from actorserve.core.messages import LoadReport
from actorserve.core.timing.profile import Profile
from actorserve.options import ClusterOptions, SchedulingOptions
from actorserve.profile_files import load_profile
from actorserve.settings import Settings, load_settings
from actorserve.sim.arrivals import arrivals
from actorserve.sim.config import RunConfig, parse_run
from actorserve.sim.results import Results, summary
from actorserve.sim.simulation import Simulation
from actorserve.sim.workload.requests import Arrival, synthetic
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.common.journals import (
    Pools,
    Record,
    between_steps_s,
    entries_of,
    last_report,
    network_s,
    pools_of,
    records_of,
)
from tools.benchmarks.common.paths import ROOT
from tools.benchmarks.serving import under_load
from tools.benchmarks.serving.servers import RunningServer
from tools.benchmarks.serving.under_load import Overrides, make_jobs, saturated_tokens_per_s, send, server_spec
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

_IDLE = [Arrival(0.0, 64, 8)] * 20
TITLE = "The simulator compared with the real engine, simulated / measured"
_SALT = "measured"  # marks the measured requests; warm-up requests have another salt
_LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E"}
_PERCENTILES = ("p50", "p99")
_COUNTS = {
    "num_preemptions": "preemptions",
    "num_swap_outs": "swap-outs",
    "num_tokens_found": "tokens found in the prefix cache",
}

Latencies = dict[str, dict[str, float]]
"""Percentiles of each latency."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Times that a profile does not hold: ``network_s`` of one message, ``step_s`` between two iterations."""

    network_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One load on both sides. ``ratios`` are simulated over measured."""

    load: float
    requests_per_s: float
    measured: Latencies
    simulated: Latencies
    ratios: Latencies
    measured_counts: dict[str, int]
    simulated_counts: dict[str, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", default="skip_join_mlfq", help="scheduling policy of the worker (%(default)s)")
    parser.add_argument("--swap", default="proactive", help="swap mode of the worker (%(default)s)")
    parser.add_argument("--prefixes", type=int, default=8, metavar="N", help="texts that prompts begin with")
    parser.add_argument(
        "--prefix-tokens", type=int, default=64, metavar="N", help="length of each such text (%(default)s)"
    )
    parser.add_argument("--profile", type=Path, metavar="FILE", help="profile of the worker (measured now)")
    prompts, outputs = "lognormal-mean:200:0.8:1024", "lognormal-mean:100:0.8:512"
    under_load.add_arguments(parser, requests=400, prompts=prompts, outputs=outputs, loads="0.5,0.9")


# --- the simulated side ----------------------------------------------------------------------------------------------


def run_config(
    arguments: argparse.Namespace, settings: Settings, pools: Pools, overheads: Overheads, load_tokens_per_s: float
) -> RunConfig:
    """The same cluster, with arrivals whose answers sum up to ``load_tokens_per_s``. Raises: ActorserveError."""
    shared = settings.workers.model_dump(include=set(SchedulingOptions.model_fields))
    shared |= settings.cluster.model_dump(include=set(ClusterOptions.model_fields))
    values = {
        "seed": arguments.seed,
        "num_requests": arguments.requests,
        "cluster": shared
        | {
            "profile": "measured",
            "kv_tokens": pools.kv_tokens,
            "host_kv_tokens": pools.host_kv_tokens,
            "tokens_per_block": pools.tokens_per_block,
            "max_context_tokens": arguments.max_tokens,
            "network_s": overheads.network_s,
            "step_overhead_s": overheads.step_s,
        },
        "lengths": {"prompt": arguments.prompt_tokens, "output": arguments.output_tokens},
        "prefixes": {"count": arguments.prefixes, "tokens": arguments.prefix_tokens},
    }
    place = "the simulated cluster"
    drawn = arrivals(parse_run(values | {"arrivals": {"rate_per_s": 1.0}}, place), ())  # a rate changes no length
    rate = load_tokens_per_s / statistics.fmean(arrival.output_tokens for arrival in drawn)
    return parse_run(values | {"arrivals": {"rate_per_s": rate}}, place)


def simulated_records(results: Results) -> list[Record]:
    """Raises: BenchError, if a request did not end."""
    outcomes = results.outcomes
    done = outcomes.completed()
    if len(done) < len(outcomes):
        raise BenchError(f"{len(outcomes) - len(done)} of {len(outcomes)} simulated requests did not end")
    columns = (outcomes.arrived_s, outcomes.first_token_s, outcomes.ended_s, outcomes.num_output)
    return [Record(*row) for row in zip(*columns, strict=True)]


# --- both sides ------------------------------------------------------------------------------------------------------


def latencies_of(records: Sequence[Record]) -> Latencies:
    """TPOT is the mean time per output token after the first."""
    values = {
        "ttft_s": [record.first_token_s - record.arrived_s for record in records],
        "tpot_s": [
            (record.ended_s - record.first_token_s) / (record.num_output - 1)
            for record in records
            if record.num_output > 1
        ],
        "e2e_s": [record.ended_s - record.arrived_s for record in records],
    }
    return {name: found for name, times_s in values.items() if (found := summary(times_s)) is not None}


def ratios(simulated: Latencies, measured: Latencies) -> Latencies:
    return {
        name: {key: simulated[name][key] / measured[name][key] for key in _PERCENTILES}
        for name in _LATENCIES
        if name in simulated and name in measured
    }


def show(result: Comparison, console: Console) -> None:
    table = Table(
        *("", "measured", "simulated", "simulated / measured"),
        title=f"{100 * result.load:.0f} % of saturation: {result.requests_per_s:.2f} requests/s",
        title_justify="left",
    )
    for name, title in _LATENCIES.items():
        for key in _PERCENTILES:
            seconds = [f"{side[name][key]:.4f}" for side in (result.measured, result.simulated)]
            table.add_row(f"{title} {key.upper()}, s", *seconds, f"{result.ratios[name][key]:.2f}")
    for name, title in _COUNTS.items():
        table.add_row(title, *(f"{counts[name]:,}" for counts in (result.measured_counts, result.simulated_counts)))
    print_table(console, table)


def table_of(comparisons: Sequence[Comparison]) -> FigureTable:
    """A row for each load: ratios of latencies, then the preemptions of both sides."""
    columns = [Column(f"{title} {key.upper()}", "x", 2) for title in _LATENCIES.values() for key in _PERCENTILES]
    columns += [Column("preemptions, simulated", decimals=0), Column("preemptions, measured", decimals=0)]
    rows = []
    for comparison in comparisons:
        ratio = (Figure(comparison.ratios[name][key], rounds=1) for name in _LATENCIES for key in _PERCENTILES)
        counts = (
            Figure(side["num_preemptions"], rounds=1)
            for side in (comparison.simulated_counts, comparison.measured_counts)
        )
        rows.append(Row(f"{100 * comparison.load:.0f} % of saturation", (*ratio, *counts)))
    return FigureTable(TITLE, "load", tuple(columns), tuple(rows))


def compare(
    config: RunConfig, profile: Profile, load: float, measured: Sequence[Record], report: LoadReport
) -> Comparison:
    """Simulate what was measured. Raises: ActorserveError."""
    results = Simulation(config, [profile]).run()
    found, expected = latencies_of(simulated_records(results)), latencies_of(measured)
    assert config.arrivals.rate_per_s is not None
    return Comparison(
        load,
        config.arrivals.rate_per_s,
        expected,
        found,
        ratios(found, expected),
        {name: getattr(report, name) for name in _COUNTS},
        {name: getattr(results.counts, name) for name in _COUNTS},
    )


def _fresh_profile(values: Overrides, file: Path) -> Path:
    """A profile of the engine that these settings give, measured now. Raises: BenchError."""
    model, workers = values["model"], values["workers"]
    options = ("--model", model["path"], "--dtype", model["dtype"], "--device", "cpu", "--threads", workers["threads"])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tools.profiling", *map(str, options), "--output", str(file)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    if done.returncode != 0:
        raise BenchError("no profile was measured")
    return file


@contextmanager
def _server(values: Overrides, folder: Path) -> Iterator[RunningServer]:
    """A fresh server that has given a token. Its journals lie in ``folder``, which is made here."""
    folder.mkdir()
    with_journal = values | {"cluster": {"journal_dir": str(folder)}}
    with RunningServer(server_spec("actorserve", with_journal, folder)) as server:
        server.first_token_s()
        yield server


def _calibrate(
    arguments: argparse.Namespace, values: Overrides, folder: Path, console: Console
) -> tuple[float, Overheads, Pools]:
    """The output tokens per second at saturation, and the overheads that a profile does not hold."""
    drawn = synthetic(under_load.length_pairs(arguments), arguments.requests, None, arguments.seed)
    begun = [
        replace(arrival, prefix=number % arguments.prefixes, prefix_tokens=arguments.prefix_tokens)
        for number, arrival in enumerate(drawn)
    ]
    jobs = make_jobs(begun, f"{arguments.seed} saturation")
    with _server(values, folder) as server:
        send(server.url, make_jobs(_IDLE, f"{arguments.seed} idle", _SALT), 1, console)
        saturation = saturated_tokens_per_s(send(server.url, jobs, arguments.concurrency, console))
    message_s, step_s = (
        network_s(entries_of(folder, "gateway-0"), _SALT),
        between_steps_s(entries_of(folder, "worker-0")),
    )
    return saturation, Overheads(message_s, step_s), pools_of(last_report(entries_of(folder, "gateway-0")))


def run(arguments: argparse.Namespace) -> int:
    """Measure, simulate and report. Raises: ActorserveError."""
    console = Console()
    machine = this_machine()
    values = under_load.overrides(arguments, arguments.policy, arguments.swap)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        values["workers"]["profile"] = str(arguments.profile or _fresh_profile(values, folder / "profile.toml"))
        profile = load_profile(Path(values["workers"]["profile"]))
        saturation, overheads, pools = _calibrate(arguments, values, folder / "calibration", console)
        if profile.kv_bytes_per_token != pools.bytes_per_token:
            sizes = f"{profile.kv_bytes_per_token} bytes of KV a token, and the worker {pools.bytes_per_token}"
            raise BenchError(f"the profile has {sizes}")
        comparisons = []
        for load in arguments.loads:
            config = run_config(arguments, load_settings(None, values), pools, overheads, load * saturation)
            jobs = make_jobs(list(arrivals(config, ())), f"{arguments.seed} {load}", _SALT)
            journals = folder / f"load-{load}"
            with _server(values, journals) as server:
                send(server.url, jobs, None, console)
            measured = records_of(entries_of(journals, "gateway-0"), _SALT)
            report = last_report(entries_of(journals, "gateway-0"))
            comparisons.append(compare(config, profile, load, measured, report))
    say(console, f"{arguments.policy}, {arguments.swap}; one worker and its clients on {machine_line(machine)}")
    say(
        console,
        f"saturation {saturation:.0f} output tokens/s; a message {1e3 * overheads.network_s:.2f} ms, "
        f"between iterations {1e3 * overheads.step_s:.2f} ms; {arguments.requests} requests at each load",
    )
    for comparison in comparisons:
        show(comparison, console)
    if not any(comparison.measured_counts["num_preemptions"] for comparison in comparisons):
        say(console, "no request was preempted; a smaller --kv-mib causes preemptions")
    details = {"saturation_tokens_per_s": saturation, "overheads": asdict(overheads), "pools": asdict(pools)}
    details |= {"settings": values, "loads": [asdict(comparison) for comparison in comparisons]}
    save_figures(arguments, [table_of(comparisons)], details, machine)
    return 0

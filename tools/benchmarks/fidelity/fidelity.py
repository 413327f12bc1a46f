"""``tools/bench fidelity``: the simulator against the real engine, in three parts.

- Schedule: the simulator gets the recorded arrivals and the recorded times of a run's iterations. What differs then is
  its schedule.
- Profile: what a profile predicts for each iteration of these runs, compared with the time that it took. It is shown as
  tools/profile measured it on an idle machine, and calibrated by the journal of an earlier run at saturation.
- End to end, as a user would predict a machine: measure a profile, calibrate it, simulate.

Each round does all of it anew: it measures a profile, saturates a server, and measures the loads, one after the other.
So a machine whose speed changes between minutes shows as a spread. Requests begin with one of a few texts. Token ids
differ between the two sides, but prompts share prefixes in the same way, and only that matters to the prefix cache.
"""

import argparse
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from actorserve.core.timing.profile import Profile
from actorserve.profile_files import load_profile, require_steady
from actorserve.settings import load_settings
from actorserve.sim.arrivals import arrivals
from actorserve.sim.simulation import Simulation
from tools.benchmarks.common.console import say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.fidelity.server_runs import Calibration, LoadedRun, calibrate, fresh_profile, run_load
from tools.benchmarks.fidelity.simulated import Twin, records_in, with_recorded_times
from tools.benchmarks.fidelity.tables import (
    END_TO_END,
    SCHEDULE,
    Comparison,
    KindRatios,
    compare,
    details_of,
    kind_ratios,
    latency_table,
    profile_table,
    show,
)
from tools.benchmarks.serving import under_load
from tools.benchmarks.serving.under_load import Overrides
from tools.figures.machine import machine_line, this_machine
from tools.journals.steps import Kind
from tools.profiling.calibrate import calibrated


@dataclass
class Found:
    """What the rounds found: for each load a comparison of each round, and the profile's ratios of each round."""

    schedule: dict[float, list[Comparison]] = field(default_factory=dict)
    end_to_end: dict[float, list[Comparison]] = field(default_factory=dict)
    kinds: list[dict[Kind, KindRatios]] = field(default_factory=list)
    calibrations: list[Calibration] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="rounds that do everything anew (%(default)s)")
    parser.add_argument("--policy", default="skip_join_mlfq", help="scheduling policy of the worker (%(default)s)")
    parser.add_argument("--swap", default="proactive", help="swap mode of the worker (%(default)s)")
    parser.add_argument("--prefixes", type=int, default=8, metavar="N", help="texts that prompts begin with")
    parser.add_argument(
        "--prefix-tokens", type=int, default=64, metavar="N", help="length of each such text (%(default)s)"
    )
    parser.add_argument("--profile", type=Path, metavar="FILE", help="profile of the worker (measured in each round)")
    prompts, outputs = "lognormal-mean:150:0.8:512", "lognormal-mean:48:0.8:200"
    under_load.add_arguments(parser, requests=100, prompts=prompts, outputs=outputs, loads="0.5,0.9")
    parser.set_defaults(kv_mib=24.0, max_tokens=640)


def run(arguments: argparse.Namespace) -> int:
    """Measure, simulate and report. Raises: ActorserveError."""
    if arguments.rounds < 1:
        raise BenchError(f"--rounds is {arguments.rounds}: expected 1 or more")
    console = Console()
    machine = this_machine()
    values = under_load.overrides(arguments, arguments.policy, arguments.swap)
    found = Found()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        for number in range(arguments.rounds):
            folder = Path(name) / f"round {number}"
            folder.mkdir()
            seeded = argparse.Namespace(**vars(arguments) | {"seed": arguments.seed + number})
            _round(seeded, values, folder, found, console)
    say(console, f"{arguments.policy}, {arguments.swap}; one worker and its clients on {machine_line(machine)}")
    tokens_per_s = median(each.tokens_per_s for each in found.calibrations)
    message_s = median(each.message_s for each in found.calibrations)
    say(
        console,
        f"saturation {tokens_per_s:.0f} output tokens/s; a message {1e3 * message_s:.2f} ms; {arguments.requests} "
        f"requests at each load of each round; {arguments.rounds} rounds: medians, and the lowest and the highest",
    )
    tables = [
        latency_table(SCHEDULE, found.schedule),
        profile_table(found.kinds),
        latency_table(END_TO_END, found.end_to_end),
    ]
    for table in tables:
        show(table, console)
    loads = [each for comparisons in found.schedule.values() for each in comparisons]
    if not any(each.measured_counts["num_preemptions"] for each in loads):
        say(console, "no request was preempted; a smaller --kv-mib causes preemptions")
    save_figures(arguments, tables, _details(found, values), machine)
    return 0


def _round(arguments: argparse.Namespace, values: Overrides, folder: Path, found: Found, console: Console) -> None:
    file = arguments.profile or folder / "profile.toml"
    profile = _given_profile(file) if arguments.profile else fresh_profile(values, file, console)
    workers = values["workers"] | {"profile": str(file)}
    values = values | {"workers": workers}
    settings = load_settings(None, values)
    calibration = calibrate(arguments, values, folder / "calibration", console)
    pools = calibration.pools
    if profile.kv_bytes_per_token != pools.bytes_per_token:
        sizes = f"{profile.kv_bytes_per_token} bytes of KV a token, and the worker {pools.bytes_per_token}"
        raise BenchError(f"the profile has {sizes}")
    found.calibrations.append(calibration)
    predicted = Twin(arguments, settings, pools, calibration.message_s)
    better = calibrated(calibration.recording)
    runs: list[LoadedRun] = []
    for load in arguments.loads:
        config = predicted.config(load * calibration.tokens_per_s)
        measured = run_load(arguments, values, list(arrivals(config, ())), folder / f"load-{load}", console)
        runs.append(measured)
        results = Simulation(config, [better]).run()
        found.end_to_end.setdefault(load, []).append(
            compare(measured.records, measured.report, records_in(results), results.counts)
        )
        twin = Twin(arguments, settings, pools, measured.message_s)
        results = with_recorded_times(twin, measured)
        found.schedule.setdefault(load, []).append(
            compare(measured.records, measured.report, records_in(results), results.counts)
        )
    found.kinds.append(kind_ratios(profile, better, [step for measured in runs for step in measured.recording.steps]))


def _given_profile(file: Path) -> Profile:
    profile = load_profile(file)
    require_steady(profile, file)
    return profile


def _details(found: Found, values: Overrides) -> dict[str, Any]:
    calibrations = [
        {"tokens_per_s": each.tokens_per_s, "message_s": each.message_s, "pools": asdict(each.pools)}
        for each in found.calibrations
    ]
    by_load = {
        name: {str(load): [details_of(each) for each in rounds] for load, rounds in comparisons.items()}
        for name, comparisons in (("schedule", found.schedule), ("end_to_end", found.end_to_end))
    }
    return {"settings": values, "calibrations": calibrations, **by_load}

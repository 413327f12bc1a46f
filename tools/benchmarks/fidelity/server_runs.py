"""Runs of a real server with one worker, as its journals tell of them.

Both sides are measured at the gateway's core: a request arrives with its ``Open``, and its tokens and its end arrive
with the worker's messages. The simulator runs the same core. So both figures include placing, the cluster's queue and
the worker, and neither includes client, HTTP and tokenizing.

Each run has a fresh server, because the simulated cluster is fresh, too.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from actorserve.core.messages import LoadReport
from actorserve.core.timing.profile import Profile
from actorserve.errors import ProtocolError
from actorserve.profile_files import MAX_DRIFT, drift_of, load_profile, require_steady
from actorserve.sim.workload.requests import Arrival, synthetic
from tools.benchmarks.common.console import say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.journals import (
    Pools,
    Record,
    entries_of,
    last_report,
    message_s,
    pools_of,
    records_of,
)
from tools.benchmarks.common.paths import ROOT
from tools.benchmarks.serving import under_load
from tools.benchmarks.serving.servers import RunningServer
from tools.benchmarks.serving.under_load import Overrides, make_jobs, saturated_tokens_per_s, send, server_spec
from tools.journals.steps import Recording, read_recording

_MOST_PROFILES = 3  # measurements of a profile, until the machine is steady
_SALT = "measured"  # marks the measured requests; the first request of a server has no salt


@dataclass(frozen=True, slots=True)
class Calibration:
    """A closed loop that saturates the worker.

    ``message_s`` is the time of a message between two processes; ``recording`` is the worker's.
    """

    tokens_per_s: float
    message_s: float
    pools: Pools
    recording: Recording


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """Requests that arrived at a given rate: ``records`` in the order of their arrival, and the worker's recording."""

    records: Sequence[Record]
    message_s: float
    recording: Recording
    report: LoadReport


def fresh_profile(values: Overrides, file: Path, console: Console) -> Profile:
    """A profile of the engine that these settings give, measured now, and again if the machine's speed drifted.

    Raises: BenchError, ProfileError.
    """
    for _ in range(_MOST_PROFILES - 1):
        profile = _measured_profile(values, file)
        if drift_of(profile) <= MAX_DRIFT:
            return profile
        say(console, f"the machine's speed changed by {drift_of(profile):.0%} during the measurement: once more")
    profile = _measured_profile(values, file)
    require_steady(profile, file)
    return profile


def _measured_profile(values: Overrides, file: Path) -> Profile:
    model, workers = values["model"], values["workers"]
    options = ("--model", model["path"], "--dtype", model["dtype"], "--device", "cpu", "--threads", workers["threads"])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tools.profiling", "--quick", *map(str, options), "--output", str(file)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    if done.returncode != 0:
        raise BenchError("no profile was measured")
    return load_profile(file)


def calibrate(arguments: argparse.Namespace, values: Overrides, folder: Path, console: Console) -> Calibration:
    """Raises: ActorserveError."""
    drawn = synthetic(under_load.length_pairs(arguments), arguments.requests, None, arguments.seed)
    begun = [
        replace(arrival, prefix=number % arguments.prefixes, prefix_tokens=arguments.prefix_tokens)
        for number, arrival in enumerate(drawn)
    ]
    jobs = make_jobs(begun, f"{arguments.seed} saturation", _SALT)
    with _server(values, folder) as server:
        tokens_per_s = saturated_tokens_per_s(send(server.url, jobs, arguments.concurrency, console))
    gateway = list(entries_of(folder, "gateway-0"))
    return Calibration(
        tokens_per_s,
        message_s(gateway, entries_of(folder, "worker-0")),
        pools_of(last_report(entries_of(folder, "coordinator"))),
        _recording(folder),
    )


def run_load(
    arguments: argparse.Namespace, values: Overrides, arrivals: Sequence[Arrival], folder: Path, console: Console
) -> LoadedRun:
    """Raises: ActorserveError."""
    jobs = make_jobs(arrivals, f"{arguments.seed} {folder.name}", _SALT)
    with _server(values, folder) as server:
        send(server.url, jobs, None, console)
    gateway = list(entries_of(folder, "gateway-0"))
    return LoadedRun(
        records_of(iter(gateway), _SALT),
        message_s(gateway, entries_of(folder, "worker-0")),
        _recording(folder),
        last_report(entries_of(folder, "coordinator")),
    )


@contextmanager
def _server(values: Overrides, folder: Path) -> Iterator[RunningServer]:
    """A fresh server that has given a token. Its journals lie in ``folder``, which is made here."""
    folder.mkdir()
    with_journal = values | {"cluster": {"journal_dir": str(folder)}}
    with RunningServer(server_spec("actorserve", with_journal, folder)) as server:
        server.first_token_s()
        yield server


def _recording(folder: Path) -> Recording:
    (journal,) = folder.glob("worker-0-*.journal")
    try:
        return read_recording(journal)
    except ProtocolError as error:
        raise BenchError(str(error)) from None

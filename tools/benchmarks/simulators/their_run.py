"""Runs SplitwiseSim in a process of its own, and reads what it says of each request."""

import csv
import os
import resource
import subprocess
from collections.abc import Sequence
from pathlib import Path

from actorserve.sim.workload.traces import TraceRow
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.simulators.latencies import SimulatedRun
from tools.benchmarks.simulators.requests_file import write_for_theirs
from tools.benchmarks.simulators.splitwise_sim_build import SplitwiseSimBuild

_CONFIG = """\
defaults:
  - cluster: half_half
  - router: noop
  - arbiter: noop
  - hardware_repo: default
  - model_repo: default
  - orchestrator_repo: default
  - performance_model: db
  - power_model: constant
  - applications: solo
  - trace: test_trace
  - start_state: baseline
  - _self_
end_time: 86400
debug: false
seed: 0
hydra:
  output_subdir: null
  job:
    chdir: true
"""
"""Its own choices for a Baseline, without the launcher for clusters, which needs Ray."""


def simulate(
    build: SplitwiseSimBuild, requests: Sequence[TraceRow], num_a100: int, num_h100: int, folder: Path
) -> SimulatedRun:
    """A Baseline of BLOOM-176B on so many machines. Its files go to ``folder``. Raises: BenchError, OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "beside.yaml").write_text(_CONFIG, encoding="utf-8")
    write_for_theirs(requests, folder / "requests.csv")
    command = [
        str(build.python),
        "run.py",
        *("--config-dir", str(folder.resolve()), "--config-name", "beside"),
        "applications.0.scheduler=token_jsq",
        f"cluster.servers.0.count={num_a100}",
        f"cluster.servers.1.count={num_h100}",
        f"trace.path='{folder.resolve() / 'requests.csv'}'",
        f"hydra.run.dir='{(folder / 'results').resolve()}'",
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    before_s = _children_s()
    done = subprocess.run(
        command,
        cwd=build.sources,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    cpu_s = _children_s() - before_s
    if done.returncode != 0:
        told = done.stderr.strip().splitlines() or ["no reason given"]
        raise BenchError(f"SplitwiseSim failed: {told[-1][:300]}")
    return read_run(folder / "results" / "detailed" / "0.csv", len(requests), cpu_s)


def read_run(file: Path, num_requests: int, cpu_s: float) -> SimulatedRun:
    """Raises: BenchError if a request is missing."""
    try:
        with file.open(newline="", encoding="utf-8") as text:
            rows = list(csv.DictReader(text))
        run = SimulatedRun(
            [float(row["ttft_times"]) for row in rows],
            [float(row["tbt_times"]) for row in rows],
            [float(row["response_times"]) for row in rows],
            cpu_s,
        )
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise BenchError(f"cannot read SplitwiseSim's results in {file}: {error}") from None
    if len(rows) != num_requests:
        raise BenchError(f"SplitwiseSim completed {len(rows)} of {num_requests} requests ({file})")
    return run


def _children_s() -> float:
    """CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

"""Runs SplitwiseSim in a process of its own, and reads what it says of each request."""

import csv
import os
import resource
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
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
"""Its own choices, without the launcher for clusters, which needs Ray."""

_RUNNING_COUNTS = """\
import runpy
import sys

sys.path.insert(0, ".")
import scheduler

def is_queue_long(self, instance, task):
    pending_tokens = instance.sched_pending_tokens
    return pending_tokens > 0 and pending_tokens + task.tokens_per_iteration > self.prompt_max_pending_batch_tokens

scheduler.MixedPoolScheduler.is_queue_long = is_queue_long
runpy.run_path("run.py", run_name="__main__")
"""
"""A program that runs SplitwiseSim with one rule of ours: a machine's queue is empty only if it computes no prompt."""


@dataclass(frozen=True, slots=True)
class Machines:
    """A cluster of SplitwiseSim: DGX-A100, or capped DGX-H100, and DGX-H100. ``num_prompt``: how many of them compute
    prompts alone, the others then computing tokens; None if all compute both. If there are two kinds, the DGX-H100
    compute the prompts.
    """

    num_a100: int = 0
    num_h100: int = 0
    num_capped: int = 0
    num_prompt: int | None = None

    def options(self) -> list[str]:
        """For its command line, as in its own scripts."""
        options = [
            f"cluster.servers.0.count={self.num_capped or self.num_a100}",
            f"cluster.servers.1.count={self.num_h100}",
        ]
        if self.num_capped:
            options.append("cluster=hhcap_half_half")
        if self.num_prompt is None:
            return [*options, "applications.0.scheduler=token_jsq"]
        num_token = self.num_a100 + self.num_h100 + self.num_capped - self.num_prompt
        options += [
            "applications.0.scheduler=mixed_pool",
            f"start_state={'splitwise_hhcap' if self.num_capped else 'splitwise'}",
            f"start_state.prompt.num_instances={self.num_prompt}",
            f"start_state.token.num_instances={num_token}",
        ]
        if self.num_h100 and (self.num_a100 or self.num_capped):
            options.append("start_state.split_type=heterogeneous")
        return options


def simulate(
    build: SplitwiseSimBuild,
    requests: Sequence[TraceRow],
    machines: Machines,
    folder: Path,
    *,
    running_counts: bool = False,
) -> SimulatedRun:
    """BLOOM-176B on these machines. Its files go to ``folder``. Raises: BenchError, OSError.

    ``running_counts``: a prompt counts to its machine's queue while the machine computes it, too. Without that
    SplitwiseSim's pools give a machine without waiting prompts another prompt of any length.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "beside.yaml").write_text(_CONFIG, encoding="utf-8")
    write_for_theirs(requests, folder / "requests.csv")
    program = ["run.py"]
    if running_counts:
        (folder / "running_counts.py").write_text(_RUNNING_COUNTS, encoding="utf-8")
        program = [str((folder / "running_counts.py").resolve())]
    command = [
        str(build.python),
        *program,
        *("--config-dir", str(folder.resolve()), "--config-name", "beside"),
        *machines.options(),
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

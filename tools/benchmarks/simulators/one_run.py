"""One simulation in a process of its own: ``python -m tools.benchmarks.simulators.one_run EXPERIMENT [KEY=VALUE ...]``.

Prints a JSON object with the speeds, the memory, and a digest of the results.
"""

import gc
import hashlib
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from actorserve.errors import ActorserveError
from actorserve.sim.simulation import Simulation
from tools.simulation.__main__ import parse_override
from tools.simulation.experiment import Case, merged, read_experiment


def main(place: str, *changes: str) -> int:
    overrides: dict[str, Any] = {}
    try:
        for change in changes:
            overrides = merged(overrides, parse_override(change))
        experiment = read_experiment(Path(place), overrides)
        rates = experiment.plan.rates or [None]
        if len(experiment.cases) > 1 or len(rates) > 1:
            raise ActorserveError(f"{place} describes several runs; expected one")
        print(json.dumps(measure(experiment.cases[0], rates[0])))
    except ActorserveError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


def measure(case: Case, rate_per_s: float | None) -> dict[str, Any]:
    """Run the case once. Raises: ActorserveError."""
    marks: list[tuple[int, int, float]] = []

    def on_progress(now: float, num_arrived: int, num_ended: int) -> None:
        marks.append((num_arrived, num_ended, time.process_time()))

    gc.disable()  # as in tools/simulate
    began_s = time.process_time()
    results = Simulation(case.at(rate_per_s), case.profiles, case.trace, on_progress).run()
    cpu_s = time.process_time() - began_s
    num_requests = len(results.outcomes)
    arriving = [mark for mark in marks if mark[0] < num_requests] or marks
    half, last = arriving[len(arriving) // 2], arriving[-1]
    figures = json.dumps(results.figures(), sort_keys=True)
    return {
        "requests_per_cpu_s": num_requests / cpu_s,
        "steady_requests_per_cpu_s": (last[1] - half[1]) / max(last[2] - half[2], 1e-9),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "digest": hashlib.sha256(figures.encode()).hexdigest(),
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

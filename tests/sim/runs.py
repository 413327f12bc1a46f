"""Small runs for tests."""

from typing import Any

from actorserve.core.timing.profile import Profile
from actorserve.sim.config import RunConfig, parse_run
from actorserve.sim.results import Results
from actorserve.sim.simulation import Simulation
from tests.sim.profiles import PROFILE
from tools.simulation.experiment import merged

NETWORK_S = 0.01
BASE: dict[str, Any] = {
    "num_requests": 1,
    "cluster": {
        "profile": "sums",
        "policy": "fcfs",
        "kv_tokens": 400,
        "tokens_per_block": 4,
        "max_context_tokens": 200,
        "max_batch_requests": 8,
        "max_batch_tokens": 100,
        "tpot_target_s": float("inf"),
        "network_s": NETWORK_S,
        "no_instance_timeout_s": 1e6,
    },
    "arrivals": {"process": "regular", "rate_per_s": 1.0},
    "lengths": {"prompt": 11, "output": 4},
}


def config(changes: dict[str, Any] | None = None) -> RunConfig:
    return parse_run(merged(BASE, changes or {}), "test")


def run(changes: dict[str, Any] | None = None, *profiles: Profile) -> Results:
    """``profiles``: those of the groups; ``PROFILE`` if there are none."""
    return Simulation(config(changes), profiles or (PROFILE,)).run()

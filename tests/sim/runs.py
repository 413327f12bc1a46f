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
MOVING: dict[str, Any] = {
    "num_requests": 150,
    "cluster": {
        "instances": 4,
        "kv_tokens": 240,
        "migration": {"enabled": True, "source_below": 8.0, "source_until": 12.0, "destination_above": 16.0},
        "late_binding": False,
        "round_s": 0.5,
        "max_queue_per_instance": 1000,
    },
    "arrivals": {"process": "gamma", "cv": 3.0, "rate_per_s": 1.2},
    "lengths": {"prompt": "uniform:1:60", "output": "uniform:1:80"},
}
"""Four instances with little memory, between which requests move."""


def config(changes: dict[str, Any] | None = None) -> RunConfig:
    return parse_run(merged(BASE, changes or {}), "test")


def run(changes: dict[str, Any] | None = None, *profiles: Profile) -> Results:
    """``profiles``: those of the groups; ``PROFILE`` if there are none."""
    return Simulation(config(changes), profiles or (PROFILE,)).run()

"""Machines of simulated instances, between which tests copy."""

import random

from actorserve.core.messages import Peer, Role
from actorserve.core.timing.profile import Profile
from actorserve.sim.config import parse_run
from actorserve.sim.cores import make_instance
from actorserve.sim.engine_model import EngineModel
from actorserve.sim.simulated_process import Process
from tests.sim.profiles import PROFILE
from tests.sim.runs import BASE
from tools.simulation.experiment import merged

BLOCK_BYTES = 4000
BLOCK_S = 0.4  # of a whole link, to which 0.25 s of latency are added
LATENCY_S = 0.25


def machine(name: str, bytes_per_s: float | None = None, profile: Profile = PROFILE) -> Process:
    cluster = parse_run(merged(BASE, {"cluster": {"migration": {"bytes_per_s": bytes_per_s}}}), "test").cluster
    engine = EngineModel(
        profile,
        BLOCK_BYTES,
        random.Random(0),
        costs=profile,
        pause_s=0.0,
        copy_slowdown=0.0,
        noise=0.0,
        run_ahead=False,
    )
    return Process(Peer(name, 1), Role.WORKER, make_instance(cluster, cluster.all_groups[0], profile), engine)

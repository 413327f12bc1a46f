"""A supervisor's children, for tests of its core."""

from actorserve.processes.restarts import RestartLimits
from actorserve.processes.status import Phase, Status
from actorserve.processes.supervision import ChildSpec, SupervisionTree

LIMITS = RestartLimits(max_restarts=2, window_s=60.0, backoff_s=1.0, max_backoff_s=1.5)
C, G, W, W1 = (ChildSpec(name, (name,), stage) for name, stage in (("c", 1), ("g", 0), ("w", 1), ("w1", 1)))
TREE = SupervisionTree((C, G, W), (W1,), LIMITS, drain_timeout_s=30.0)
READY = Status(Phase.READY)

"""What the coordinator's core is told when it is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.migration.pairing import PairingConfig
from actorserve.core.scheduling.mlfq import PROMOTE_AFTER_S
from actorserve.core.scheduling.policies import MIN_SHARE


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """``max_waiting_requests`` may wait here, and ``max_queue_per_instance`` at each instance, beside those it runs.

    ``promote_after_s_of`` is by priority, for classes that wait for their promotion longer or shorter than
    ``promote_after_s``. ``placement_ttl_s`` bounds how long a placement counts that no report confirms: its gateway may
    have died. After ``report_ttl_s`` of silence an instance gets nothing, until it reports again.

    ``dispatch`` is one of ``core.placement.baselines.ORDERS``. Without ``late_binding`` requests wait on instances:
    each goes at once to one that could ever hold it. Where prompts have prefixes in common but instances have no prefix
    cache, ``prefix_aware`` has to be off. Without ``migration``, ``scaling`` or ``checkpoints`` there are none; else
    they are decided each ``round_s``.
    """

    max_waiting_requests: int
    retry_s: float
    max_queue_per_instance: int = 64
    promote_after_s: float = PROMOTE_AFTER_S
    promote_after_s_of: Mapping[int, float] = field(default_factory=dict)
    min_share: float = MIN_SHARE
    report_ttl_s: float = inf
    dispatch: str = "freeness"
    late_binding: bool = True
    prefix_aware: bool = True
    round_s: float = 0.25
    migration: PairingConfig | None = None
    scaling: ScalingConfig | None = None
    checkpoints: bool = False

    @property
    def placement_ttl_s(self) -> float:
        return 5 * self.retry_s

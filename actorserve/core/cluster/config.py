"""The configuration of the coordinator's core."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.defaults import MAX_QUEUE_PER_INSTANCE, RETRY_S, placement_ttl_s
from actorserve.core.migration.pairing import PairingConfig
from actorserve.core.pools.config import PoolsConfig
from actorserve.core.power.governor import PowerConfig
from actorserve.core.scheduling.mlfq import PROMOTE_AFTER_S
from actorserve.core.scheduling.policies import MIN_SHARE


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """``max_waiting_requests`` may wait at the coordinator, and ``max_queue_per_instance`` more on each instance for
    their first iteration.

    ``promote_after_s_of`` is by priority, for classes whose promotion time is not ``promote_after_s``. An instance that
    has not reported for ``report_ttl_s`` gets no requests until it reports again. Gateways get a digest of all load
    reports every ``digest_s``.

    ``dispatch`` is one of ``core.placement.rules.DISPATCH_RULES``. Without ``late_binding`` each request goes at
    once to an instance that could ever hold it, and waits there. ``prefix_aware`` must be off if instances have no
    prefix cache but prompts have prefixes in common. ``migration``, ``scaling`` and ``checkpoints`` are decided once
    per ``round_s``; None or False switches them off.
    """

    max_waiting_requests: int = 2048
    retry_s: float = RETRY_S
    max_queue_per_instance: int = MAX_QUEUE_PER_INSTANCE
    promote_after_s: float = PROMOTE_AFTER_S
    promote_after_s_of: Mapping[int, float] = field(default_factory=dict)
    min_share: float = MIN_SHARE
    report_ttl_s: float = inf
    digest_s: float = 1.0
    dispatch: str = "freeness"
    late_binding: bool = True
    prefix_aware: bool = True
    round_s: float = 0.25
    migration: PairingConfig | None = None
    scaling: ScalingConfig | None = None
    checkpoints: bool = False
    pools: PoolsConfig = field(default_factory=PoolsConfig)
    power: PowerConfig = field(default_factory=PowerConfig)

    @property
    def placement_ttl_s(self) -> float:
        """How long a placement counts if no load report confirms it."""
        return placement_ttl_s(self.retry_s)

"""The recipe that a core was made from. Together with the core's inputs it is all that a replay needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.scheduling.mlfq import PROMOTE_AFTER_S
from actorserve.core.scheduling.policies import MIN_SHARE
from actorserve.core.timing.profile import Profile


@dataclass(frozen=True, slots=True)
class InstanceRecipe:
    """An instance: its sizes, its engine's profile, and its policy with the policy's settings (``make_policy``)."""

    config: InstanceConfig
    profile: Profile
    policy: str
    promote_after_s: float = PROMOTE_AFTER_S
    promote_after_s_of: Mapping[int, float] = field(default_factory=dict)
    min_share: float = MIN_SHARE


Recipe = InstanceRecipe | ClusterConfig | GatewayConfig

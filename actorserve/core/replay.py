"""The recipe that a core was made from. Together with the core's inputs it is all that a replay needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.state import ClusterState
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.gateway.state import GatewayState
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.instance.state import InstanceState
from actorserve.core.instance.steps import MakePlan
from actorserve.core.prediction.predictor import LengthPredictor
from actorserve.core.scheduling.batch import Batch
from actorserve.core.scheduling.mlfq import PROMOTE_AFTER_S
from actorserve.core.scheduling.policies import MIN_SHARE, make_policy
from actorserve.core.timing.profile import Profile
from actorserve.core.timing.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class InstanceRecipe:
    """An instance: its sizes, its engine's profile, and its policy with the policy's settings (``make_policy``)."""

    config: InstanceConfig
    profile: Profile
    policy: str
    promote_after_s: float = PROMOTE_AFTER_S
    promote_after_s_of: Mapping[int, float] = field(default_factory=dict)
    min_share: float = MIN_SHARE

    def make(self, make_plan: MakePlan = Batch.step_plan, predictor: LengthPredictor | None = None) -> InstanceState:
        """A new instance. ``predictor``: for simulations. Raises: ValueError for an unknown policy."""
        times = StepTimes(self.profile)
        policy = make_policy(
            self.policy,
            times,
            promote_after_s=self.promote_after_s,
            promote_after_s_of=self.promote_after_s_of,
            min_share=self.min_share,
            predictor=predictor,
        )
        return InstanceState(self.config, policy, times, make_plan)


Recipe = InstanceRecipe | ClusterConfig | GatewayConfig


def make_core(recipe: Recipe) -> InstanceState | ClusterState | GatewayState:
    """A new core of an instance, of the coordinator, or of a gateway."""
    match recipe:
        case InstanceRecipe():
            return recipe.make()
        case ClusterConfig():
            return ClusterState(recipe)
        case GatewayConfig():
            return GatewayState(recipe)

"""Makes cores from their recipes: for the processes, for the simulator, and for the replay of a journal.

The recipes have a module of their own, because the coordinator's process does not load the other cores.
"""

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.state import ClusterState
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.gateway.state import GatewayState
from actorserve.core.instance.state import InstanceState
from actorserve.core.instance.steps import MakePlan
from actorserve.core.prediction.predictor import LengthPredictor
from actorserve.core.recipes import InstanceRecipe, Recipe
from actorserve.core.scheduling.batch import Batch
from actorserve.core.scheduling.policies import make_policy
from actorserve.core.timing.step_times import StepTimes


def make_instance_core(
    recipe: InstanceRecipe, make_plan: MakePlan = Batch.step_plan, predictor: LengthPredictor | None = None
) -> InstanceState:
    """A new instance. ``predictor``: for simulations. Raises: ValueError for an unknown policy."""
    times = StepTimes(recipe.profile)
    policy = make_policy(
        recipe.policy,
        times,
        promote_after_s=recipe.promote_after_s,
        promote_after_s_of=recipe.promote_after_s_of,
        min_share=recipe.min_share,
        predictor=predictor,
    )
    return InstanceState(recipe.config, policy, times, make_plan)


def make_core(recipe: Recipe) -> InstanceState | ClusterState | GatewayState:
    """A new core of an instance, of the coordinator, or of a gateway."""
    match recipe:
        case InstanceRecipe():
            return make_instance_core(recipe)
        case ClusterConfig():
            return ClusterState(recipe)
        case GatewayConfig():
            return GatewayState(recipe)

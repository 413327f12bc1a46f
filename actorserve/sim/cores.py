"""The cores of a simulated cluster's processes, made from its table with the mapping that a server's settings use."""

from dataclasses import replace

from actorserve.core.cluster.state import ClusterState
from actorserve.core.gateway.state import GatewayState
from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import InstanceRole, StepPlan
from actorserve.core.power.governor import PowerConfig
from actorserve.core.prediction.learned import LearnedLengths
from actorserve.core.prediction.predictor import LengthPredictor
from actorserve.core.replay import make_instance_core
from actorserve.core.scheduling.batch import Batch
from actorserve.core.timing.profile import Profile
from actorserve.core_configs import EngineSizes, cluster_config, gateway_config, instance_recipe
from actorserve.sim.cluster_table import ClusterTable, GroupTable
from actorserve.sim.workload.known_lengths import KnownLengths

_TICKET_KEY = b"\0"  # simulated instances do not check tickets


def make_coordinator(cluster: ClusterTable) -> ClusterState:
    config, power = cluster_config(cluster), cluster.power
    if power.budget is not None:
        watts = power.budget * sum(group.count * (group.watts or 0.0) for group in cluster.all_groups)
        config = replace(config, power=PowerConfig(watts, {}, power.phase_curves, cluster.tpot_target_s))
    return ClusterState(config)


def make_gateway(cluster: ClusterTable) -> GatewayState:
    return GatewayState(gateway_config(cluster))


def make_instance(cluster: ClusterTable, group: GroupTable, profile: Profile) -> InstanceState:
    """An instance of ``group``, with the step and copy times of ``profile``."""
    sizes = EngineSizes(
        cluster.num_blocks(group),
        cluster.tokens_per_block,
        cluster.tokens_per_block * profile.kv_bytes_per_token,
        cluster.max_context_tokens,
        cluster.num_host_blocks(group),
        num_layers=profile.num_layers,
    )
    recipe = instance_recipe(cluster, sizes, profile, _TICKET_KEY, InstanceRole(group.role))
    for_baselines = replace(
        recipe.config,
        whole_prompts=cluster.whole_prompts,
        max_decode_wait_s=cluster.promote_after_s,
        report_changes=cluster.report_changes,
    )
    # A simulated request's max_tokens is its output's length, so no predictor here may be limited by it.
    error = cluster.length_error
    predictor: LengthPredictor = LearnedLengths() if error is None else KnownLengths(error)
    return make_instance_core(replace(recipe, config=for_baselines), _plan_nothing, predictor)


def _plan_nothing(batch: Batch, step_id: int) -> StepPlan:
    """The engine's model looks at the iteration itself, and needs no tokens and blocks."""
    return StepPlan(step_id, (), (), (), (), ())

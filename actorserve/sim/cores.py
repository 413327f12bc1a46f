"""The cores of a simulated cluster's processes, mapped from its table as a server's settings are."""

from actorserve.core.cluster.state import ClusterState
from actorserve.core.gateway.state import GatewayState
from actorserve.core.instance.state import InstanceState
from actorserve.core.timing.profile import Profile
from actorserve.core_configs import EngineSizes, cluster_config, gateway_config, instance_recipe
from actorserve.sim.cluster_table import ClusterTable

_TICKET_KEY = b"\0"  # simulated instances read each other's KV without proof


def make_coordinator(cluster: ClusterTable) -> ClusterState:
    return ClusterState(cluster_config(cluster))


def make_gateway(cluster: ClusterTable) -> GatewayState:
    return GatewayState(gateway_config(cluster))


def make_instance(cluster: ClusterTable, profile: Profile) -> InstanceState:
    """An instance whose engine has memory as ``cluster`` says, and takes the times that ``profile`` says."""
    sizes = EngineSizes(
        cluster.num_blocks,
        cluster.tokens_per_block,
        cluster.tokens_per_block * profile.kv_bytes_per_token,
        cluster.max_context_tokens,
        cluster.num_host_blocks,
    )
    return instance_recipe(cluster, sizes, profile, _TICKET_KEY).make()

"""The cores of a simulated cluster's processes, from its configuration."""

from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.cluster.state import ClusterConfig, ClusterState
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.gateway.state import GatewayState
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.instance.state import InstanceState
from actorserve.core.migration.pairing import PairingConfig
from actorserve.core.migration.source import MigrationConfig, MigrationMode
from actorserve.core.scheduling.policies import make_policy
from actorserve.core.scheduling.swapping import SwapMode
from actorserve.core.timing.profile import Profile
from actorserve.core.timing.step_times import StepTimes
from actorserve.sim.cluster_table import ClusterTable

_TICKET_KEY = "00"  # nobody in a simulation asks for a proof


def make_coordinator(cluster: ClusterTable) -> ClusterState:
    pairing, scaling = cluster.pairing, cluster.scaling
    return ClusterState(
        ClusterConfig(
            cluster.max_waiting_requests,
            cluster.retry_s,
            max_queue_per_instance=cluster.max_queue_per_instance,
            promote_after_s=cluster.promote_after_s,
            min_share=cluster.min_share,
            dispatch=cluster.dispatch,
            late_binding=cluster.late_binding,
            prefix_aware=cluster.prefix_cache,
            round_s=cluster.round_s,
            migration=None
            if cluster.migration == "off"
            else PairingConfig(
                source_below=pairing.source_below,
                source_until=pairing.source_until,
                destination_above=pairing.destination_above,
                ttl_s=pairing.order_ttl_s,
                rest_s=pairing.rest_s,
                max_moves=pairing.max_moves,
            ),
            scaling=None
            if scaling is None
            else ScalingConfig(
                max_workers=scaling.max_instances,
                min_workers=scaling.min_instances,
                scale_out_below=scaling.scale_out_below,
                scale_in_above=scaling.scale_in_above,
                hold_s=scaling.hold_s,
            ),
        )
    )


def make_gateway(cluster: ClusterTable) -> GatewayState:
    return GatewayState(
        GatewayConfig(
            cluster.retry_s,
            cluster.no_instance_timeout_s,
            cluster.resume_timeout_s,
            max_queue_per_instance=cluster.max_queue_per_instance,
        )
    )


def make_instance(cluster: ClusterTable, profile: Profile) -> InstanceState:
    """With the sizes that its engine and the settings would tell it."""
    times = StepTimes(profile)
    policy = make_policy(cluster.policy, times, promote_after_s=cluster.promote_after_s, min_share=cluster.min_share)
    kv_bytes = profile.kv_bytes_per_token
    config = InstanceConfig(
        num_blocks=cluster.num_blocks,
        tokens_per_block=cluster.tokens_per_block,
        bytes_per_block=cluster.tokens_per_block * kv_bytes,
        max_context_tokens=cluster.max_context_tokens,
        max_batch_requests=cluster.max_batch_requests,
        max_batch_tokens=cluster.max_batch_tokens,
        load_report_s=cluster.load_report_s,
        retry_s=cluster.retry_s,
        tpot_target_s=cluster.tpot_target_s,
        headroom_bytes={int(name): num_tokens * kv_bytes for name, num_tokens in cluster.headroom_tokens.items()},
        prefix_cache=cluster.prefix_cache,
        num_host_blocks=cluster.num_host_blocks,
        swap_mode=SwapMode(cluster.swap),
        migration=MigrationConfig(
            mode=MigrationMode.LIVE if cluster.migration == "off" else MigrationMode(cluster.migration),
            ticket_key=_TICKET_KEY,
            max_outgoing=cluster.pairing.max_outgoing,
            timeout_s=cluster.pairing.timeout_s,
        ),
    )
    return InstanceState(config, policy, times)

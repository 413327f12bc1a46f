"""Builds the cores' configs from the operator's options, for the real processes and for the simulator alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.kv.layer_groups import ONE_GROUP, LayerGroups
from actorserve.core.messages import InstanceRole
from actorserve.core.migration.config import LayerCopies, MigrationConfig, MigrationMode
from actorserve.core.migration.pairing import PairingConfig
from actorserve.core.pools.config import PoolsConfig
from actorserve.core.power.curves import PhaseCurves
from actorserve.core.power.governor import PowerConfig
from actorserve.core.recipes import InstanceRecipe
from actorserve.core.scheduling.swapping import SwapMode
from actorserve.core.timing.profile import Profile
from actorserve.options import (
    ClusterOptions,
    MigrationOptions,
    PoolsOptions,
    ScalingOptions,
    SchedulingOptions,
    default_of,
)

_REPORTS_A_DIGEST: Final = 5  # a worker sends the coordinator this many reports for each that a gateway gets
_REPORTS_MISSED: Final = 5  # without this many load reports in a row, a worker counts as unwell
_ROUNDS_PER_ORDER: Final = 4  # how long an order to move requests stays valid
_CPU_BYTES_PER_S: Final = 32 * 2**20  # copying takes cores from other workers; at this rate, a few percent


class Chosen(Protocol):
    """The operator's options, from a settings file or from a simulation's cluster table.

    ``num_workers``: how many workers run or are starting when the coordinator begins.
    """

    @property
    def workers(self) -> SchedulingOptions: ...

    @property
    def cluster(self) -> ClusterOptions: ...

    @property
    def migration(self) -> MigrationOptions: ...

    @property
    def pools(self) -> PoolsOptions: ...

    @property
    def scaling(self) -> ScalingOptions: ...

    @property
    def num_workers(self) -> int: ...


class ChosenPower(Protocol):
    """The operator's options about power, from a settings file."""

    @property
    def budget_watts(self) -> float | None: ...

    @property
    def hold_s(self) -> float: ...


def power_config(
    power: ChosenPower, curves: PhaseCurves, tpot_target_s: float, budget_watts_of: Mapping[str, float]
) -> PowerConfig:
    """The config of the governor. ``budget_watts_of``: the budgets of hosts by name."""
    return PowerConfig(power.budget_watts, dict(budget_watts_of), curves, tpot_target_s, power.hold_s)


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """How many KV blocks an engine has on its device and on its host; a block is of one layer group, in which
    ``num_layers`` layers can be copied one by one. ``is_cpu``: it computes on the host's cores. ``shows_progress``:
    other workers can follow its iterations.
    """

    num_blocks: int
    tokens_per_block: int
    bytes_per_block: int
    max_context_tokens: int
    num_host_blocks: int = 0
    is_cpu: bool = False
    layer_groups: LayerGroups = ONE_GROUP
    num_layers: int = 1
    shows_progress: bool = True

    @property
    def bytes_per_row(self) -> int:
        """Of the blocks of ``tokens_per_block`` tokens, in all layers that keep them."""
        return self.bytes_per_block * max(1, self.layer_groups.num_full)


def cluster_config(chosen: Chosen) -> ClusterConfig:
    """The config of the coordinator's core."""
    workers, cluster, migration, scaling = chosen.workers, chosen.cluster, chosen.migration, chosen.scaling
    return ClusterConfig(
        max_waiting_requests=cluster.max_waiting_requests,
        retry_s=cluster.retry_s,
        max_queue_per_instance=workers.max_queue_per_instance,
        promote_after_s=workers.promote_after_s,
        promote_after_s_of=workers.promote_after_by_priority_s,
        min_share=workers.min_share,
        report_ttl_s=_report_ttl_s(cluster),
        digest_s=_REPORTS_A_DIGEST * cluster.load_report_s,
        dispatch=cluster.dispatch,
        late_binding=cluster.late_binding,
        prefix_aware=workers.prefix_cache,
        round_s=cluster.round_s,
        migration=PairingConfig(
            source_below=migration.source_below,
            source_until=migration.source_until,
            destination_above=migration.destination_above,
            ttl_s=_ROUNDS_PER_ORDER * cluster.round_s,
            rest_s=migration.rest_s,
            max_moves=migration.max_moves,
        )
        if migration.enabled
        else None,
        scaling=ScalingConfig(
            max_workers=scaling.max_workers,
            min_workers=scaling.min_workers or default_of(ScalingConfig, "min_workers"),
            scale_out_below=scaling.scale_out_below,
            scale_in_above=scaling.scale_in_above,
            hold_s=scaling.hold_s,
            start_timeout_s=scaling.start_timeout_s,
            num_initial=chosen.num_workers,
        )
        if scaling.max_workers is not None
        else None,
        checkpoints=migration.checkpoint_tokens > 0,
        pools=_pools_config(chosen),
    )


def gateway_config(chosen: Chosen) -> GatewayConfig:
    """The config of a gateway's core."""
    cluster = chosen.cluster
    return GatewayConfig(
        retry_s=cluster.retry_s,
        no_instance_timeout_s=cluster.no_instance_timeout_s,
        resume_timeout_s=cluster.resume_timeout_s,
        max_queue_per_instance=chosen.workers.max_queue_per_instance,
        prefix_aware=chosen.workers.prefix_cache,
        report_ttl_s=_report_ttl_s(cluster),
        pools=_pools_config(chosen),
    )


def _pools_config(chosen: Chosen) -> PoolsConfig:
    pools = chosen.pools
    return PoolsConfig(
        pools.max_pending_tokens, pools.hold_s, pools.across_kinds, pools.follow_load, chosen.workers.tpot_target_s
    )


def _report_ttl_s(cluster: ClusterOptions) -> float:
    # A worker that has been silent for less than half of death_after_s may only have been delayed.
    return max(_REPORTS_MISSED * cluster.load_report_s, cluster.death_after_s / 2)


def instance_config(
    chosen: Chosen, sizes: EngineSizes, ticket_key: bytes = b"", role: InstanceRole = InstanceRole.MIXED
) -> InstanceConfig:
    """The config of an instance's core. A worker with a ticket signed by ``ticket_key`` may read the engine's KV."""
    workers, cluster, migration = chosen.workers, chosen.cluster, chosen.migration
    bytes_per_s = migration.bytes_per_s
    limits = workers.batch_limits()
    return InstanceConfig(
        num_blocks=sizes.num_blocks,
        tokens_per_block=sizes.tokens_per_block,
        bytes_per_block=sizes.bytes_per_block,
        max_context_tokens=sizes.max_context_tokens,
        layer_groups=sizes.layer_groups,
        max_batch_requests=limits.requests,
        max_batch_tokens=limits.tokens,
        max_prompt_tokens=chosen.pools.max_prompt_tokens,
        load_report_s=cluster.load_report_s,
        retry_s=cluster.retry_s,
        tpot_target_s=workers.tpot_target_s,
        run_ahead=workers.run_ahead,
        headroom_bytes={
            priority: num_tokens * sizes.bytes_per_row // sizes.tokens_per_block
            for priority, num_tokens in workers.headroom_tokens_by_priority.items()
        },
        prefix_cache=workers.prefix_cache,
        num_host_blocks=sizes.num_host_blocks,
        swap_mode=SwapMode(workers.swap),
        migration=MigrationConfig(
            mode=MigrationMode(migration.mode),
            ticket_key=ticket_key.hex(),
            max_outgoing=migration.max_outgoing,
            timeout_s=migration.timeout_s,
            bytes_per_s=_CPU_BYTES_PER_S if bytes_per_s is None and sizes.is_cpu else bytes_per_s,
            num_layers=sizes.num_layers,
            layer_copies=LayerCopies(migration.layer_copies) if sizes.shows_progress else LayerCopies.AFTER,
        ),
        checkpoint_tokens=migration.checkpoint_tokens,
        role=role,
    )


def instance_recipe(
    chosen: Chosen,
    sizes: EngineSizes,
    profile: Profile,
    ticket_key: bytes = b"",
    role: InstanceRole = InstanceRole.MIXED,
) -> InstanceRecipe:
    """The recipe of an instance's core: its config, its policy, and the profile of its engine's times."""
    workers = chosen.workers
    return InstanceRecipe(
        instance_config(chosen, sizes, ticket_key, role),
        profile,
        workers.policy,
        promote_after_s=workers.promote_after_s,
        promote_after_s_of=workers.promote_after_by_priority_s,
        min_share=workers.min_share,
    )

"""The coordinator process."""

import asyncio

import uvloop

from actorserve.actors.membership import COORDINATOR_NAME
from actorserve.actors.program import make_node, on_termination
from actorserve.actors.scaler import Starts, make_scaler
from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import Effect, StartWorker
from actorserve.core.messages import Role, StartFailed
from actorserve.core.migration.pairing import PairingConfig
from actorserve.processes.child import Child
from actorserve.processes.status import NO_WORKER
from actorserve.settings import Settings

_REPORTS_MISSED = 5  # so many in a row, and a worker is not well
_ROUNDS_OF_AN_ORDER = 4


def main(child: Child) -> None:
    """Place requests until told to end. What it knows it hears anew after a restart."""
    uvloop.run(_run(child))


def cluster_config(settings: Settings) -> ClusterConfig:
    """What the core is made from, of settings whose number of workers is resolved."""
    cluster, workers = settings.cluster, settings.workers
    migration, scaling = settings.migration, settings.scaling
    return ClusterConfig(
        max_waiting_requests=cluster.max_waiting_requests,
        retry_s=cluster.retry_s,
        max_queue_per_instance=workers.max_waiting_requests,
        promote_after_s=workers.promote_after_s,
        promote_after_s_of=workers.promote_after_by_priority_s,
        min_share=workers.min_share,
        # Who is silent for less than half of what counts as death may only have been held up.
        report_ttl_s=max(_REPORTS_MISSED * cluster.load_report_s, cluster.death_after_s / 2),
        dispatch=cluster.dispatch,
        late_binding=cluster.late_binding,
        prefix_aware=workers.prefix_cache,
        round_s=cluster.round_s,
        migration=PairingConfig(
            source_below=migration.source_below,
            source_until=migration.source_until,
            destination_above=migration.destination_above,
            ttl_s=_ROUNDS_OF_AN_ORDER * cluster.round_s,
            rest_s=migration.rest_s,
            max_moves=migration.max_moves,
        )
        if migration.enabled
        else None,
        scaling=ScalingConfig(
            max_workers=scaling.max_workers,
            min_workers=scaling.min_workers or 1,
            scale_out_below=scaling.scale_out_below,
            scale_in_above=scaling.scale_in_above,
            hold_s=scaling.hold_s,
            start_timeout_s=scaling.start_timeout_s,
            num_initial=workers.count or 0,
        )
        if scaling.max_workers is not None
        else None,
        checkpoints=migration.checkpoint_tokens > 0,
    )


async def _run(child: Child) -> None:
    settings = child.settings
    config = cluster_config(settings)
    core = ClusterState(config)
    scaler = make_scaler(settings.scaling, child.status)

    def perform(effect: Effect) -> None:
        if starts is None or not isinstance(effect, StartWorker):
            raise TypeError(f"the coordinator was asked for {effect}")
        starts.start_worker()

    node = make_node(
        COORDINATOR_NAME, Role.COORDINATOR, core, perform, settings.cluster, child.runtime_dir, recipe=config
    )
    starts = None if scaler is None else Starts(scaler, node.inject)
    asyncio.get_running_loop().add_signal_handler(NO_WORKER, node.inject, StartFailed())
    on_termination(node.stop)
    child.status.ready()
    async with asyncio.TaskGroup() as group:
        starting = None if starts is None else group.create_task(starts.run(), name="starts")
        await node.run()
        if starting is not None:
            starting.cancel()

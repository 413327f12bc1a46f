"""The coordinator process."""

import asyncio

import uvloop

from actorserve.actors.membership import COORDINATOR_NAME
from actorserve.actors.process import make_node, on_termination
from actorserve.actors.scaler import Starts, make_scaler
from actorserve.core.cluster import ClusterConfig, ClusterState
from actorserve.core.effects import Effect, StartWorker
from actorserve.core.messages import Role, StartFailed
from actorserve.core.pairing import PairingConfig
from actorserve.core.scaling import ScalingConfig
from actorserve.processes.child import Child
from actorserve.processes.status import NO_WORKER

_REPORTS_MISSED = 5  # so many in a row, and a worker is not well
_ROUNDS_OF_AN_ORDER = 4


def main(child: Child) -> None:
    """Place requests until told to end. What it knows it hears anew after a restart."""
    uvloop.run(_run(child))


async def _run(child: Child) -> None:
    settings, workers = child.settings.cluster, child.settings.workers
    migration, scaling = child.settings.migration, child.settings.scaling
    config = ClusterConfig(
        max_waiting_requests=settings.max_waiting_requests,
        retry_s=settings.retry_s,
        max_queue_per_instance=workers.max_waiting_requests,
        promote_after_s=workers.promote_after_s,
        promote_after_s_of=workers.promote_after_by_priority_s,
        min_share=workers.min_share,
        report_ttl_s=_REPORTS_MISSED * settings.load_report_s,
        dispatch=settings.dispatch,
        late_binding=settings.late_binding,
        prefix_aware=workers.prefix_cache,
        round_s=settings.round_s,
        migration=PairingConfig(
            source_below=migration.source_below,
            source_until=migration.source_until,
            destination_above=migration.destination_above,
            ttl_s=_ROUNDS_OF_AN_ORDER * settings.round_s,
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
        )
        if scaling.max_workers is not None
        else None,
        checkpoints=migration.checkpoint_tokens > 0,
    )
    core = ClusterState(config)
    scaler = make_scaler(child.settings.scaling, child.status)

    def perform(effect: Effect) -> None:
        if starts is None or not isinstance(effect, StartWorker):
            raise TypeError(f"the coordinator was asked for {effect}")
        starts.start_worker()

    node = make_node(COORDINATOR_NAME, Role.COORDINATOR, core, perform, settings, child.runtime_dir, origin=config)
    starts = None if scaler is None else Starts(scaler, node.inject)
    asyncio.get_running_loop().add_signal_handler(NO_WORKER, node.inject, StartFailed())
    on_termination(node.stop)
    child.status.ready()
    async with asyncio.TaskGroup() as group:
        starting = None if starts is None else group.create_task(starts.run(), name="starts")
        await node.run()
        if starting is not None:
            starting.cancel()

"""The coordinator actor: it places requests, pairs workers for migration, and has workers started and stopped."""

import asyncio

from actorserve.actors.cluster_actor import ClusterActor, ClusterCore
from actorserve.actors.node import Node
from actorserve.actors.scaler import Scaler, Starts
from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.cluster.state import ClusterConfig
from actorserve.core.effects import Effect, StartWorker
from actorserve.core.migration.pairing import PairingConfig
from actorserve.settings import Settings

_REPORTS_MISSED = 5  # so many in a row, and a worker is not well
_ROUNDS_OF_AN_ORDER = 4


class CoordinatorActor(ClusterActor):
    """Its core (``ClusterState``) is the cluster's policy. ``scaler`` starts workers; None: their number is fixed."""

    def __init__(self, core: ClusterCore, node: Node, scaler: Scaler | None = None) -> None:
        super().__init__(core, node)
        self._starts = None if scaler is None else Starts(scaler, self.tell)

    def perform(self, effect: Effect) -> None:
        if self._starts is not None and isinstance(effect, StartWorker):
            self._starts.start_worker()
        else:
            super().perform(effect)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            starting = None if self._starts is None else group.create_task(self._starts.run(), name="starts")
            await super().run()
            if starting is not None:
                starting.cancel()


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

"""The coordinator actor: it places requests, pairs workers for migration, and starts and stops workers."""

import asyncio

from actorserve.actors.cluster_actor import ClusterActor, ClusterCore
from actorserve.actors.node import Node
from actorserve.actors.scaler import Scaler, Starts
from actorserve.core.effects import Effect, StartWorker


class CoordinatorActor(ClusterActor):
    """Its core (``ClusterState``) holds the cluster's policy. ``scaler``: None if the number of workers is fixed."""

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

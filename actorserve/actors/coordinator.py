"""The coordinator process."""

import asyncio

import uvloop

from actorserve.actors.membership import COORDINATOR_NAME
from actorserve.actors.program import make_node, on_termination
from actorserve.actors.scaler import Starts, make_scaler
from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import Effect, StartWorker
from actorserve.core.messages import Role, StartFailed
from actorserve.core_configs import cluster_config
from actorserve.processes.child import Child
from actorserve.processes.status import NO_WORKER


def main(child: Child) -> None:
    """Place requests until told to end. What it knows it hears anew after a restart."""
    uvloop.run(_run(child))


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

"""The coordinator process."""

import uvloop

from actorserve.actors.membership import COORDINATOR_NAME
from actorserve.actors.process import make_node, on_termination
from actorserve.core.cluster import ClusterConfig, ClusterState
from actorserve.core.effects import Effect
from actorserve.core.messages import Role
from actorserve.processes.child import Child


def main(child: Child) -> None:
    """Place requests until told to end. What it knows it hears anew after a restart."""
    uvloop.run(_run(child))


async def _run(child: Child) -> None:
    settings, workers = child.settings.cluster, child.settings.workers
    config = ClusterConfig(
        max_waiting_requests=settings.max_waiting_requests,
        retry_s=settings.retry_s,
        max_queue_per_instance=workers.max_waiting_requests,
        promote_after_s=workers.promote_after_s,
        promote_after_s_of=workers.promote_after_by_priority_s,
        min_share=workers.min_share,
    )
    core = ClusterState(config)
    node = make_node(COORDINATOR_NAME, Role.COORDINATOR, core, _perform, settings, child.runtime_dir, origin=config)
    on_termination(node.stop)
    child.status.ready()
    await node.run()


def _perform(effect: Effect) -> None:
    raise TypeError(f"the coordinator only sends, and was asked for {effect}")

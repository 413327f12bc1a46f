"""The coordinator process."""

import asyncio
from dataclasses import replace

import uvloop

from actorserve.actors.cluster_trust import open_trust
from actorserve.actors.console_desk import open_desk
from actorserve.actors.coordinator import CoordinatorActor
from actorserve.actors.node import open_node
from actorserve.actors.scaler import make_scaler
from actorserve.cluster.file import read_cluster_file
from actorserve.core.cluster.state import ClusterState
from actorserve.core.messages import PROTOCOL_VERSION, Hello, Role, StartFailed
from actorserve.core_configs import cluster_config, power_config
from actorserve.processes.child import Child
from actorserve.processes.signals import on_termination
from actorserve.processes.status import NO_WORKER
from actorserve.profile_files import load_power_curves


def main(child: Child) -> None:
    """Run the coordinator until it is told to end. After a restart it learns its state again from its peers."""
    uvloop.run(_run(child))


async def _run(child: Child) -> None:
    settings = child.settings
    power = power_config(
        settings.power,
        load_power_curves(settings.power.curves),
        settings.workers.tpot_target_s,
        _budgets_of_hosts(child),
    )
    config = replace(cluster_config(settings), power=power)
    hello = Hello(PROTOCOL_VERSION, Role.COORDINATOR)
    network, trust = child.network, open_trust(child)
    node = open_node(child.name, hello, settings.cluster, network, config, trust)
    core = ClusterState(config)
    desk = open_desk(child.runtime_dir, settings, lambda: core.settings_set)
    node.transport.on_refusal(desk.refused)
    if trust is not None and (console := network.console()) is not None:
        desk.serve_elsewhere(console.bind, trust)
    actor = CoordinatorActor(core, node, make_scaler(settings.scaling, child.status), desk)
    asyncio.get_running_loop().add_signal_handler(NO_WORKER, actor.tell, StartFailed())
    actor.on_reload_keys.append(child.reloads.run)
    child.reloads.start()

    def end() -> None:
        child.status.stopping(0.0)
        actor.stop()

    on_termination(end)
    child.status.ready()
    await actor.run()


def _budgets_of_hosts(child: Child) -> dict[str, float]:
    """The hosts' power budgets in the cluster's file. Raises: SettingsError."""
    if child.cluster_file is None:
        return {}
    hosts = read_cluster_file(child.cluster_file).hosts
    return {host.name: host.budget_watts for host in hosts if host.budget_watts is not None}

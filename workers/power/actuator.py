"""The actuator process: it sets the power caps of its host's GPUs, as the serving coordinator says.

Setting caps needs root, so it is a process of its own that does nothing else: it takes one message, from one process,
and sets limits within what the driver allows. With keys it has a key pair of its own, which no other process of the
host can read (``actorserve keys --actuator``). All that it reads or writes as root lies in folders of root's; of a
server on one host it only uses sockets in the server's runtime folder.
"""

import asyncio
import os
from pathlib import Path
from typing import Final

import uvloop

from actorserve.actors.cluster_actor import ClusterActor
from actorserve.actors.cluster_trust import open_trust
from actorserve.actors.node import Node, open_node
from actorserve.core.effects import Effect, ReadPower, SetCaps
from actorserve.core.messages import PROTOCOL_VERSION, Hello, PowerReport, Role
from actorserve.core.power.actuator import ActuatorConfig, ActuatorState
from actorserve.processes.child import Child
from actorserve.processes.signals import on_termination
from workers.power.caps import PowerCaps
from workers.power.former_limits import FormerLimits
from workers.power.nvml import Gpus

NAME: Final = Role.POWER.value
_END_S: Final = 10.0


class ActuatorActor(ClusterActor):
    """Reads the devices and sets caps for its core."""

    def __init__(self, core: ActuatorState, node: Node, caps: PowerCaps) -> None:
        super().__init__(core, node)
        self._caps = caps

    def perform(self, effect: Effect) -> None:
        match effect:
            case SetCaps(devices=devices, caps_watts=caps_watts):
                self._caps.set_caps(devices, caps_watts)
            case ReadPower():
                self.tell(self._caps.read())
            case _:
                super().perform(effect)

    def say_farewell(self) -> None:
        """Put the former limits back, tell the coordinator what the devices have now, and end."""
        self._caps.put_back()
        for peer in self.peers:
            self._transport.send(peer, PowerReport(0, self._caps.read().devices))
        self.stop()


def run_actuator(child: Child, gpus: Gpus | None, state_folder: Path, config: ActuatorConfig) -> None:
    """Run until SIGTERM. The former limits are in ``state_folder``.

    Raises: ActorserveError; OSError if former limits cannot be kept.
    """
    caps = PowerCaps(gpus, FormerLimits(state_folder))
    uvloop.run(_run(child, caps, config))


async def _run(child: Child, caps: PowerCaps, config: ActuatorConfig) -> None:
    hello = Hello(PROTOCOL_VERSION, Role.POWER)
    settings = child.settings.cluster.model_copy(update={"journal_dir": None})  # that folder is another user's
    # The coordinator has another user, and must be able to connect to a socket in its own folder.
    old = os.umask(0)
    try:
        node = open_node(child.name, hello, settings, child.network, None, open_trust(child))
    finally:
        os.umask(old)
    actor = ActuatorActor(ActuatorState(config), node, caps)
    child.reloads.start()

    def end() -> None:
        child.status.stopping(_END_S)
        actor.say_farewell()

    on_termination(end)
    child.status.ready()
    try:
        await actor.run()
    finally:
        caps.put_back()
        await asyncio.sleep(0)

"""The actuator process: it sets the power caps of its host's GPUs, as the serving coordinator says.

Setting caps needs root, so it is a process of its own that does nothing else: it takes one message, from one process,
and sets limits within what the driver allows. With keys it has a key pair of its own, which no other process of the
host can read (``actorserve keys --actuator``). All that it reads or writes as root lies in folders of root's; of a
server on one host it only uses sockets in the server's runtime folder.
"""

import asyncio
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Final

import uvloop

from actorserve.actors.cluster_actor import ClusterActor, ClusterCore
from actorserve.actors.cluster_trust import open_trust
from actorserve.actors.node import Node, open_node
from actorserve.core.effects import Effect, PutBackLimits, ReadPower, SetCaps
from actorserve.core.messages import PROTOCOL_VERSION, DevicePower, Hello, PowerRead, PowerReport, Role
from actorserve.core.power.actuator import ActuatorConfig, ActuatorState
from actorserve.processes.child import Child
from actorserve.processes.signals import on_termination
from workers.power.caps import PowerCaps
from workers.power.driver_thread import PATIENCE_S, DriverThread
from workers.power.former_limits import FormerLimits
from workers.power.nvml import Gpus

NAME: Final = Role.POWER.value
_END_S: Final = 10.0
_log: Final = logging.getLogger("actorserve.power")


class ActuatorActor(ClusterActor):
    """Reads the devices and sets caps for its core, on a thread, because a driver may hang.

    A driver that does not answer for ``PATIENCE_S`` is reported: its devices have the highest one of the caps that were
    read last, that they may have got since then, and that they get when it answers; what they draw is not known; and
    they cannot be set. Before the first reading there is nothing to report. ``failure`` is an error of the thread that
    ended the actor.
    """

    def __init__(self, core: ClusterCore, node: Node, caps: PowerCaps, driver: DriverThread) -> None:
        super().__init__(core, node)
        self.failure: BaseException | None = None
        self._caps = caps
        self._driver = driver
        self._wanted: dict[str, float] = {}  # caps to set as soon as the driver has answered, in this order
        self._wants_former = False  # the former limits are to be put back before that
        self._wants_reading = False
        self._setting: dict[str, float] = {}  # what is being set
        self._unread: dict[str, float] = {}  # the highest caps that devices may have got since the last reading
        self._asked_s: float | None = None  # since when the driver has been busy
        self._last: PowerRead | None = None
        self._was_late = False
        self._is_ending = False

    def perform(self, effect: Effect) -> None:
        match effect:
            case SetCaps(devices=devices, caps_watts=caps_watts):
                for device, watts in zip(devices, caps_watts, strict=True):
                    self._wanted.pop(device, None)
                    self._wanted[device] = watts
                self._ask()
            case PutBackLimits():
                self._wanted.clear()
                self._wants_former = True
                self._ask()
            case ReadPower():
                self._wants_reading = True
                self._ask()
                self._tell_if_late()
            case _:
                super().perform(effect)

    async def end(self) -> None:
        """Put the former limits back, tell the coordinator what the devices have now, and end. If the driver hangs, the
        limits are put back by the next actuator.
        """
        self._is_ending = True
        read = self._driver.call(self._put_back)
        await asyncio.wait([read], timeout=_END_S / 2)
        if not read.done():
            _log.warning("the driver does not answer, so former limits are put back when this starts again")
        elif read.exception() is None:
            for peer in self.peers:
                self._transport.send(peer, PowerReport(0, read.result().devices))
        self.stop()

    def _put_back(self) -> PowerRead:
        self._caps.put_back()
        return self._caps.read()

    def _ask(self) -> None:
        """Have the driver do what is wanted, unless it is busy."""
        if self._asked_s is not None or self._is_ending:
            return
        wanted, puts_back, reads = self._wanted, self._wants_former, self._wants_reading
        if not (wanted or puts_back or reads):
            return
        self._wanted, self._wants_former, self._wants_reading, self._setting = {}, False, False, wanted
        self._asked_s = self._clock()
        if puts_back and self._last is not None:
            self._unread = {power.device: power.most_watts for power in self._last.devices}
        for device, watts in wanted.items():
            self._unread[device] = max(watts, self._unread.get(device, 0.0))

        def work() -> PowerRead | None:
            if puts_back:
                self._caps.put_back()
            self._caps.set_caps(tuple(wanted), tuple(wanted.values()))
            return self._caps.read() if reads else None

        self._driver.call(work).add_done_callback(self._on_answer)

    def _on_answer(self, answer: "asyncio.Future[PowerRead | None]") -> None:
        if not self._wants_former:
            # Orders that were only repeated meanwhile are done, so the reading that follows them is this one.
            setting = self._setting
            self._wanted = {device: watts for device, watts in self._wanted.items() if setting.get(device) != watts}
        self._asked_s, self._setting, self._was_late = None, {}, False
        if answer.cancelled() or self._is_ending:
            return
        self.failure = answer.exception()
        if self.failure is not None:
            self.stop()
            return
        read = answer.result()
        if read is not None and not (self._wanted and self._wants_reading):  # a newer reading follows newer caps
            self._last, self._unread = read, {}
            self.tell(read)
        self._ask()

    def _tell_if_late(self) -> None:
        if self._asked_s is None or self._clock() < self._asked_s + PATIENCE_S:
            return
        if not self._was_late:
            self._was_late = True
            _log.warning("the driver has not answered for %.0f s, so what GPUs draw is not known", PATIENCE_S)
        if self._last is not None:
            self.tell(PowerRead(tuple(map(self._unknown, self._last.devices)), None))

    def _unknown(self, power: DevicePower) -> DevicePower:
        cap_watts = power.cap_watts
        if cap_watts is not None:
            coming = (caps.get(power.device, 0.0) for caps in (self._unread, self._wanted))
            cap_watts = max(cap_watts, *coming)
        return replace(
            power, cap_watts=cap_watts, enforced_watts=None, draw_watts=None, is_throttled=False, can_set=False
        )


def run_actuator(child: Child, gpus: Gpus | None, state_folder: Path, config: ActuatorConfig) -> None:
    """Run until SIGTERM. The former limits are in ``state_folder``.

    Raises: ActorserveError; OSError if that folder cannot be used.
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
    driver = DriverThread()
    actor = ActuatorActor(ActuatorState(config), node, caps, driver)
    child.reloads.start()
    endings: list[asyncio.Task[None]] = []

    def end() -> None:
        child.status.stopping(_END_S)
        endings.append(asyncio.get_running_loop().create_task(actor.end()))

    on_termination(end)
    child.status.ready()
    try:
        await actor.run()
    finally:
        await asyncio.wait([driver.call(caps.put_back)], timeout=_END_S / 2)
    if actor.failure is not None:
        raise actor.failure

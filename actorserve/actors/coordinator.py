"""The coordinator actor: it places requests, pairs workers for migration, starts and stops workers, and serves
operators.
"""

import asyncio
from collections.abc import Callable

from actorserve.actors.cluster_actor import ClusterActor, ClusterCore
from actorserve.actors.console_desk import ConsoleDesk, is_caller
from actorserve.actors.node import Node
from actorserve.actors.scaler import Scaler, Starts
from actorserve.core.effects import Audit, Effect, Send, StartWorker
from actorserve.core.messages import Answer


class CoordinatorActor(ClusterActor):
    """Its core (``ClusterState``) holds the cluster's policy. ``scaler``: None if the number of workers is fixed.
    ``desk``: None if no operator's console can connect.
    """

    def __init__(
        self, core: ClusterCore, node: Node, scaler: Scaler | None = None, desk: ConsoleDesk | None = None
    ) -> None:
        super().__init__(core, node)
        self._starts = None if scaler is None else Starts(scaler, self.tell)
        self._desk = desk
        if desk is not None:
            self.tell(desk.audit.acts_done())

    def perform(self, effect: Effect) -> None:
        if self._starts is not None and isinstance(effect, StartWorker):
            self._starts.start_worker(effect.role)
        elif self._desk is not None and isinstance(effect, Audit):
            self._desk.write(effect)
        else:
            super().perform(effect)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            starting = None if self._starts is None else group.create_task(self._starts.run(), name="starts")
            await super().run()
            if starting is not None:
                starting.cancel()

    def _open(self, wake: Callable[[], None]) -> None:
        super()._open(wake)
        if self._desk is not None:
            self._desk.on_arrival(wake)

    def _close(self) -> None:
        super()._close()
        if self._desk is not None:
            self._desk.close()

    def _receive(self, now: float) -> bool:
        if self._desk is not None:
            for caller, command in self._desk.take():
                self._handle(command, now, caller)
        return super()._receive(now)

    def _send(self, effect: Send, now: float) -> None:
        if self._desk is not None and is_caller(effect.to) and isinstance(effect.message, Answer):
            self._desk.send(effect.to, effect.message)
        else:
            super()._send(effect, now)

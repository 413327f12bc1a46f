"""The worker actor: an instance's core, and the shell around the engine that computes for it."""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from actorserve.actors.cluster_actor import ClusterActor, ClusterCore
from actorserve.actors.node import Node
from actorserve.core.effects import (
    AddToEngine,
    CancelFetch,
    Drained,
    DropFromEngine,
    Effect,
    Fetch,
    RunStep,
    SwapIn,
    SwapOut,
)
from actorserve.core.messages import Drain, Message, Peer
from actorserve.processes.status import Reporter

EngineEffect = AddToEngine | DropFromEngine | RunStep | SwapOut | SwapIn | Fetch | CancelFetch
_END_S: Final = 5.0  # for a step that is still in flight when the instance has drained


class EngineShell(Protocol):
    """The engine's interface to the actor, on the event loop (``workers.worker_engine``)."""

    async def run(self, tell: Callable[[Message], None]) -> None:
        """Compute until cancelled. ``tell`` gets each StepDone, GrammarReady, CopyDone, CopyFailed and MemoryLimit.

        Raises: whatever the engine raises.
        """
        ...

    def perform(self, effect: EngineEffect) -> None:
        """Queue an effect. Never blocks."""
        ...

    def forget(self, peer: Peer) -> None:
        """``peer`` went down: close the connection to its KV."""
        ...

    def stop(self, patience_s: float) -> None:
        """Called after ``run``: end, and block for at most ``patience_s`` until the step in flight is over."""
        ...


class WorkerActor(ClusterActor):
    """One instance. It runs until its core has drained: after SIGTERM (``drain``), or after the coordinator's Drain.

    ``core`` is an ``InstanceState``. ``status`` reports to the supervisor.
    """

    def __init__(self, core: ClusterCore, node: Node, engine: EngineShell, status: Reporter) -> None:
        super().__init__(core, node)
        self._engine = engine
        self._status = status
        self._drained = asyncio.Event()
        self._was_terminated = False
        self.comes_back = False  # whether the process is to be started again after it has drained

    def perform(self, effect: Effect) -> None:
        match effect:
            case AddToEngine() | DropFromEngine() | RunStep() | SwapOut() | SwapIn() | Fetch() | CancelFetch():
                self._engine.perform(effect)
            case Drained(comes_back=comes_back):
                self.comes_back = comes_back
                self._drained.set()
            case _:
                super().perform(effect)

    def peer_went_down(self, peer: Peer) -> None:
        self._engine.forget(peer)

    def drain(self, timeout_s: float) -> None:
        """Finish the running requests or migrate them, then end; end after ``timeout_s`` in any case.

        A second call does nothing.
        """
        if not self._was_terminated:
            self._was_terminated = True
            self._status.stopping(timeout_s)
            self.tell(Drain())
            asyncio.get_running_loop().call_later(timeout_s, self._drained.set)

    async def run(self) -> None:
        """Serve until the instance has drained.

        A worker that the coordinator drains has no time limit. When it has drained, it reports that it stopped on
        purpose, so that the supervisor does not restart it, or that it is to be started again.

        Raises: as ``step``, or whatever the engine raised; both in an ExceptionGroup.
        """
        async with asyncio.TaskGroup() as group:
            computing = group.create_task(self._engine.run(self.tell), name="engine")
            group.create_task(super().run(), name="actor")
            await self._drained.wait()
            if self.comes_back:
                self._status.restarts("an operator restarts it")
            elif not self._was_terminated:
                self._status.stopped("it is not needed now")
            self.stop()
            computing.cancel()
        self._engine.stop(_END_S)

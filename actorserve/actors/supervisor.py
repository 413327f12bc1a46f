"""The supervisor actor: it starts the processes of one host as its children, restarts them, and ends them in order.

It is not a member of the cluster. Its mailbox holds the reports and the ends of its children. Its core is
``processes.supervisor_state``. ``processes.supervision_tree`` lists the children and the limits of restarts.
"""

import asyncio
import signal
from typing import Protocol

from actorserve.actors.actor import Actor
from actorserve.errors import ActorserveError
from actorserve.processes.child_process import ChildProcess
from actorserve.processes.supervision import (
    AllEnded,
    ChildEnded,
    ChildReported,
    KillChild,
    News,
    Reload,
    ShutDown,
    SignalChild,
    StartChild,
    SupervisionTree,
    SupervisorEffect,
    SupervisorEvent,
)
from actorserve.processes.supervisor_state import SupervisorState


class Listener(Protocol):
    """Shows the supervisor's news to a person. It is called on the supervisor's event loop, and returns at once."""

    def show(self, news: News) -> None: ...


class ChildFailedError(ActorserveError):
    """A child could not be kept running."""


class Supervisor(Actor[SupervisorEvent, SupervisorEffect]):
    """Keeps the children of ``tree`` running until ``shut_down``. Construct it on the running event loop."""

    _core: SupervisorState

    def __init__(self, tree: SupervisionTree, listener: Listener) -> None:
        super().__init__("supervisor", SupervisorState(tree), asyncio.get_running_loop().time)
        self._listener = listener
        self._lives = asyncio.TaskGroup()
        self._processes: dict[str, ChildProcess] = {}
        self._failure: str | None = None

    @property
    def was_killed(self) -> bool:
        """Whether the children were ended without waiting for the work in flight."""
        return self._core.was_killed

    def shut_down(self) -> None:
        """Drain the children and end. A second call ends them at once."""
        self.tell(ShutDown())

    def reload(self) -> None:
        """Have the children read again what may change while they run."""
        self.tell(Reload())

    def perform(self, effect: SupervisorEffect) -> None:
        match effect:
            case StartChild(spec=spec):
                process = self._processes[spec.name] = ChildProcess(spec)
                self._lives.create_task(self._live(spec.name, process))
            case SignalChild(name=name, number=number):
                self._processes[name].send_signal(number)
            case KillChild(name=name):
                self._processes[name].send_signal(signal.SIGKILL)
            case AllEnded(failure=failure):
                self._failure = failure
                self.stop()
            case _:
                self._listener.show(effect)

    async def run(self) -> None:
        """Start the children, and return when all have ended after ``shut_down``.

        Raises: ChildFailedError if all were ended because one child could not be kept running, or if a child did not
        finish its drain.
        """
        async with self._lives:
            await super().run()
        if self._failure is not None:
            raise ChildFailedError(self._failure)

    async def _live(self, name: str, process: ChildProcess) -> None:
        how, is_orderly = await process.run(lambda report: self.tell(ChildReported(name, report)))
        self.tell(ChildEnded(name, how, is_orderly))

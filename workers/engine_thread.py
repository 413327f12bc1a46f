"""The engine on a thread of its own: commands go in, results come back on the event loop."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable

from actorserve.core.effects import AddToEngine, DropFromEngine, Effect, RunStep
from actorserve.core.messages import StepDone
from workers.engine import Engine


class EngineThread:
    """Performs the core's engine effects in the order in which they were issued, and never on the event loop.

    An exception of the engine ends the thread and comes out of ``failure``: the process then ends, and its requests go
    on elsewhere.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._effects: queue.SimpleQueue[Effect | None] = queue.SimpleQueue()
        self.failure: asyncio.Future[None] = self._loop.create_future()

    def start(self, on_done: Callable[[StepDone], None]) -> None:
        """Begin; ``on_done`` is called on the loop with each StepDone."""
        self._on_done = on_done
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def perform(self, effect: Effect) -> None:
        """Queue an effect. Steps are bounded to one in flight by the core, and the rest by its requests."""
        self._effects.put(effect)

    def stop(self) -> None:
        """End after what is queued. Does not wait: a step in flight has nobody left to read its result."""
        self._effects.put(None)

    def _run(self) -> None:
        try:
            while (effect := self._effects.get()) is not None:
                self._do(effect)
        except Exception as error:  # noqa: BLE001 - the thread's edge: every failure of the engine ends the process
            self._tell(self._fail, error)

    def _do(self, effect: Effect) -> None:
        match effect:
            case RunStep(plan=plan):
                done = self._engine.step(plan)
                self._tell(self._on_done, done)
            case AddToEngine(request=request):
                self._engine.add(request)
            case DropFromEngine(request_id=request_id):
                self._engine.drop(request_id)
            case _:
                raise TypeError(f"not for an engine: {effect}")

    def _tell(self, callback: Callable[..., None], what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends, and nobody is left to hear
            self._loop.call_soon_threadsafe(callback, what)

    def _fail(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

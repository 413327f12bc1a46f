"""The engine on two threads of its own, for iterations and for copies: commands go in, results come back on the event
loop.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable

from actorserve.core.effects import AddToEngine, DropFromEngine, Effect, RunStep, SwapIn, SwapOut
from actorserve.core.messages import CopyDone, StepDone
from workers.engine import Engine

_Queue = queue.SimpleQueue[Effect | None]


class EngineThread:
    """Performs the core's engine effects, and never on the event loop.

    Requests and steps go in the order in which they were issued, and so do copies, which go beside the steps: the core
    alone keeps a copy from meeting a step that touches its blocks. An exception of the engine ends its thread and comes
    out of ``failure``: the process then ends, and its requests go on elsewhere.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._steps: _Queue = queue.SimpleQueue()
        self._copies: _Queue = queue.SimpleQueue()
        self.failure: asyncio.Future[None] = self._loop.create_future()

    def start(self, on_done: Callable[[StepDone | CopyDone], None]) -> None:
        """Begin; ``on_done`` is called on the loop with each StepDone and CopyDone."""
        self._on_done = on_done
        for name, effects in (("engine", self._steps), ("copies", self._copies)):
            threading.Thread(target=self._run, args=(effects,), name=name, daemon=True).start()

    def perform(self, effect: Effect) -> None:
        """Queue an effect. Steps are bounded to one in flight by the core, copies by its blocks, and the rest by its
        requests.
        """
        (self._copies if isinstance(effect, SwapOut | SwapIn) else self._steps).put(effect)

    def stop(self) -> None:
        """End after what is queued. Does not wait: a step in flight has nobody left to read its result."""
        self._steps.put(None)
        self._copies.put(None)

    def _run(self, effects: _Queue) -> None:
        try:
            while (effect := effects.get()) is not None:
                self._do(effect)
        except Exception as error:  # noqa: BLE001 - the thread's edge: every failure of the engine ends the process
            self._tell(self._fail, error)

    def _do(self, effect: Effect) -> None:
        match effect:
            case RunStep(plan=plan):
                self._tell(self._on_done, self._engine.step(plan))
            case SwapOut(copy_id=copy_id, device_blocks=device_blocks, host_blocks=host_blocks):
                began = time.perf_counter()
                self._engine.copy_out(device_blocks, host_blocks)
                self._tell(self._on_done, CopyDone(copy_id, time.perf_counter() - began))
            case SwapIn(copy_id=copy_id, host_blocks=host_blocks, device_blocks=device_blocks):
                began = time.perf_counter()
                self._engine.copy_in(host_blocks, device_blocks)
                self._tell(self._on_done, CopyDone(copy_id, time.perf_counter() - began))
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

"""A thread that asks a driver, because a driver may take long to answer, or hang for ever when a GPU fails."""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, TypeVar

PATIENCE_S: Final = 2.0
"""After this time without an answer, the driver counts as one that hangs."""
T = TypeVar("T")


class DriverThread:
    """Calls functions one after the other on one thread. Neither the event loop nor the process's end waits for it.

    Make it on the running event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._run, name="power driver", daemon=True).start()

    def call(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        """Call ``function`` after those before it. The future has what it returns or raises."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.put((function, future))
        return future

    def _run(self) -> None:
        while True:
            function, future = self._calls.get()
            result: Any = None
            error: Exception | None = None
            try:
                result = function()
            except Exception as raised:  # noqa: BLE001 - the thread's edge: the caller gets every failure
                error = raised
            try:
                self._loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                return  # the loop has ended


def _settle(future: "asyncio.Future[Any]", result: object, error: Exception | None) -> None:
    if future.done():
        return  # cancelled
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)

"""The engine on threads of its own: for iterations and their results, for copies, and to read other workers' KV.

Effects go in, and results come back on the event loop.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from actorserve.core.effects import (
    AddToEngine,
    CancelFetch,
    DropFromEngine,
    Effect,
    Fetch,
    RunStep,
    SwapIn,
    SwapOut,
)
from actorserve.core.messages import CopyDone, CopyFailed, GrammarReady, RequestSpec, StepDone
from workers.engine import Engine, PendingStep
from workers.kv_transfer.cancellation import Cancellation
from workers.kv_transfer.errors import TransferError
from workers.sampling.grammars import PreparedGrammar

Done = StepDone | GrammarReady | CopyDone | CopyFailed

_NOT_WANTED: Final = "it is no longer wanted"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Add:
    """A request that the engine gets, and its grammar, which is being prepared meanwhile."""

    request: RequestSpec
    grammar: PreparedGrammar | None


@dataclass(frozen=True, slots=True)
class _Read:
    fetch: Fetch
    cancellation: Cancellation


_Queue = queue.SimpleQueue[Effect | _Add | _Read | None]


class Fetcher(Protocol):
    """Reads other workers' KV: ``workers.kv_transfer.transfer.KVTransfer``."""

    def fetch(self, fetch: Fetch, cancellation: Cancellation | None = None) -> None: ...


class EngineThread:
    """Performs the core's engine effects outside the event loop.

    Requests and steps keep the order in which the core issued them, and so do copies. Copies run concurrently with
    steps; the core alone makes sure that no step touches blocks that a copy uses. Fetches run concurrently with both.
    A request's grammar is prepared as soon as the request comes, even if a step is in flight.
    Urgent fetches have a thread of their own, so that they never wait for a fetch that a bandwidth budget holds back.
    Each fetch that follows another worker's iteration has one, too, because nothing else may wait for that iteration.

    An exception of the engine ends its thread and becomes the result of ``failure``: then the process ends, and other
    workers continue its requests. A fetch that fails, or is cancelled before its end, only gives a CopyFailed.
    """

    def __init__(self, engine: Engine, fetcher: Fetcher | None = None) -> None:
        """``fetcher``: None if the core issues no Fetch."""
        self._engine = engine
        self._fetcher = fetcher
        self._loop = asyncio.get_running_loop()
        self._steps: _Queue = queue.SimpleQueue()
        self._results: queue.SimpleQueue[PendingStep | None] = queue.SimpleQueue()
        self._copies: _Queue = queue.SimpleQueue()
        self._fetches: _Queue = queue.SimpleQueue()
        self._urgent_fetches: _Queue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._cancellations: dict[int, Cancellation] = {}  # by copy id, of the fetches that are not answered yet
        self.failure: asyncio.Future[None] = self._loop.create_future()

    def start(self, on_done: Callable[[Done], None]) -> None:
        """Start the threads. They call ``on_done`` on the loop with each StepDone, GrammarReady, CopyDone and
        CopyFailed.
        """
        self._on_done = on_done
        if self._engine.kv.progress is not None:
            self._engine.kv.progress.restart()
        for name, effects in (
            ("engine", self._steps),
            ("copies", self._copies),
            ("fetches", self._fetches),
            ("urgent fetches", self._urgent_fetches),
        ):
            self._start_thread(name, self._run, effects)
        self._start_thread("results", self._tell_results)

    def _start_thread(self, name: str, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def perform(self, effect: Effect) -> None:
        """Queue an effect. The queues need no bounds: the core keeps two steps in flight, the number of blocks bounds
        copies and fetches, and the number of requests bounds the rest.
        """
        match effect:
            case SwapOut() | SwapIn():
                self._copies.put(effect)
            case Fetch(copy_id=copy_id, is_urgent=is_urgent, ticket=ticket):
                read = _Read(effect, Cancellation())
                self._cancellations[copy_id] = read.cancellation
                if ticket.step_id:
                    self._threads = [thread for thread in self._threads if thread.is_alive()]
                    self._start_thread("follows a step", self._run_one, read)
                else:
                    (self._urgent_fetches if is_urgent else self._fetches).put(read)
            case CancelFetch(copy_id=copy_id) if copy_id in self._cancellations:
                self._cancellations[copy_id].cancel(_NOT_WANTED)
            case CancelFetch():
                pass  # its answer is on its way
            case AddToEngine(request=request):
                grammar = self._engine.prepare(request)
                self._steps.put(_Add(request, grammar))
                if grammar is not None:
                    ready = GrammarReady(request.request_id)
                    grammar.add_done_callback(lambda _: self._tell(self._on_done, ready))
            case _:
                self._steps.put(effect)

    def stop(self, patience_s: float = 0.0) -> None:
        """End the threads after the queued effects, and wait at most ``patience_s`` for that.

        The results are not needed any more. But a thread that returns from native code while the interpreter ends
        would crash the process.
        """
        for effects in (self._steps, self._copies, self._fetches, self._urgent_fetches):
            effects.put(None)
        until_s = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _run(self, effects: _Queue) -> None:
        try:
            while (effect := effects.get()) is not None:
                self._do(effect)
        except Exception as error:  # noqa: BLE001 - the thread's edge: every failure of the engine ends the process
            self._tell(self._fail, error)
        if effects is self._steps:
            self._results.put(None)

    def _run_one(self, read: _Read) -> None:
        try:
            self._do(read)
        except Exception as error:  # noqa: BLE001 - as above
            self._tell(self._fail, error)

    def _tell_results(self) -> None:
        try:
            while (step := self._results.get()) is not None:
                self._tell(self._on_done, step.result())
        except Exception as error:  # noqa: BLE001 - as above
            self._tell(self._fail, error)

    def _do(self, effect: Effect | _Add | _Read) -> None:
        match effect:
            case RunStep(plan=plan):
                self._results.put(self._engine.begin(plan))
            case SwapOut(copy_id=copy_id, device_blocks=device_blocks, host_blocks=host_blocks):
                began = time.perf_counter()
                self._engine.copy_out(device_blocks, host_blocks)
                self._tell(self._on_done, CopyDone(copy_id, time.perf_counter() - began))
            case SwapIn(copy_id=copy_id, host_blocks=host_blocks, device_blocks=device_blocks):
                began = time.perf_counter()
                self._engine.copy_in(host_blocks, device_blocks)
                self._tell(self._on_done, CopyDone(copy_id, time.perf_counter() - began))
            case _Read() if self._fetcher is not None:
                self._tell(self._on_fetched, _fetch(self._fetcher, effect))
            case _Add(request, grammar):
                self._engine.add(request, grammar)
            case DropFromEngine(request_id=request_id):
                self._engine.drop(request_id)
            case _:
                raise TypeError(f"not an effect for an engine: {effect}")

    def _on_fetched(self, done: CopyDone | CopyFailed) -> None:
        del self._cancellations[done.copy_id]
        self._on_done(done)

    def _tell(self, callback: Callable[..., None], what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, because the process ends
            self._loop.call_soon_threadsafe(callback, what)

    def _fail(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)


def _fetch(fetcher: Fetcher, read: _Read) -> CopyDone | CopyFailed:
    fetch, began = read.fetch, time.perf_counter()
    try:
        fetcher.fetch(fetch, read.cancellation)
    except TransferError as error:
        if not read.cancellation.is_cancelled:
            _log.warning("KV of %s was not copied: %s", fetch.source.name, error)
        return CopyFailed(fetch.copy_id)
    except Exception:  # noqa: BLE001 - a source's bytes or a driver may raise anything; the requests here go on
        _log.exception("KV of %s was not copied", fetch.source.name)
        return CopyFailed(fetch.copy_id)
    return CopyDone(fetch.copy_id, time.perf_counter() - began)

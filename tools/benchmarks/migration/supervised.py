"""Pairs' workers under a real supervisor, from their start to the end of a measurement."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable

from actorserve.actors.cluster_actor import ClusterActor
from actorserve.actors.supervisor import Supervisor
from actorserve.processes.restarts import RestartLimits
from actorserve.processes.supervision import AllReady, ChildSpec, News, Progress, SupervisionTree
from tools.benchmarks.migration.pair import Pair


class _Starting:
    """A supervisor's listener that knows when all workers are ready, and shows a line for each step until then."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.is_over = asyncio.Event()
        self._show = show

    def show(self, news: News) -> None:
        match news:
            case Progress(name=name, report=report):
                self._show(f"{name}: {report.text or report.phase}")
            case AllReady():
                self.is_over.set()


async def with_workers(
    pairs: Iterable[Pair],
    work: Callable[[], Coroutine[None, None, None]],
    show: Callable[[str], None],
    max_restarts: int = 0,
) -> None:
    """Start the pairs' workers, do ``work`` when all are ready and have met, and end them, whatever happens.

    A worker that dies is started again, up to ``max_restarts`` times.

    Raises: ActorserveError, if a worker fails; whatever ``work`` raises.
    """
    pairs = list(pairs)
    specs: list[ChildSpec] = [spec for pair in pairs for spec in pair.specs]
    starting = _Starting(show)
    tree = SupervisionTree(tuple(specs), limits=RestartLimits(max_restarts, max_backoff_s=1.0))
    supervisor = Supervisor(tree, starting)
    supervising = asyncio.create_task(supervisor.run())
    working = asyncio.create_task(_work(pairs, starting, work))
    try:
        await asyncio.wait([supervising, working], return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        await asyncio.wait([working])
        supervisor.shut_down()
        await supervising
    await working


async def _work(pairs: list[Pair], starting: _Starting, work: Callable[[], Coroutine[None, None, None]]) -> None:
    await starting.is_over.wait()
    actors: list[ClusterActor] = []
    running: list[asyncio.Task[None]] = []
    working = None
    try:
        for pair in pairs:
            pair.open_actors()
            actors += pair.actors
        running = [asyncio.create_task(actor.run()) for actor in actors]
        for pair in pairs:
            await pair.wait_met()
        working = asyncio.create_task(work())
        await asyncio.wait([working, *running], return_when=asyncio.FIRST_COMPLETED)
    finally:
        if working is not None:
            working.cancel()
            await asyncio.wait([working])
        for actor in actors:
            actor.stop()
        if running:
            await asyncio.wait(running)
    for task in running:
        task.result()
    await working

"""The rules by which copies between instances use the links of their machines, and the choice of one of them."""

from collections.abc import Callable
from typing import Protocol

from actorserve.core.effects import Fetch
from actorserve.core.messages import CopyDone
from actorserve.sim.cluster_table import LinksTable
from actorserve.sim.links.shared import SharedLinks
from actorserve.sim.simulated_process import Process
from actorserve.sim.timeline import Timeline

OnDone = Callable[[Process, Process, CopyDone], None]
"""Called when a copy is done, with its destination, its source, and the message for the destination."""


class Links(Protocol):
    """A rule. ``begin`` begins a copy of a ``share`` of the fetch's bytes from ``source``, and calls ``OnDone`` when it
    is done.
    """

    def begin(self, fetch: Fetch, source: Process, destination: Process, share: float = 1.0) -> None: ...


class LinksInTurn:
    """One copy after another, at each machine (``EngineModel.fetch``)."""

    def __init__(self, timeline: Timeline, on_done: OnDone) -> None:
        self._timeline = timeline
        self._on_done = on_done

    def begin(self, fetch: Fetch, source: Process, destination: Process, share: float = 1.0) -> None:
        done_s, duration_s = destination.worker_engine.fetch(
            source.worker_engine,
            len(fetch.blocks),
            self._timeline.now,
            bytes_per_s=destination.worker_core.config.migration.bytes_per_s,
            is_urgent=fetch.is_urgent,
            into_host=fetch.into_host,
            share=share,
        )
        done = CopyDone(fetch.copy_id, duration_s)
        self._timeline.at(done_s, self._on_done, destination, source, done)


class LinksApart:
    """Each copy has the bandwidth of both machines for itself, as in SplitwiseSim."""

    def __init__(self, timeline: Timeline, on_done: OnDone) -> None:
        self._timeline = timeline
        self._on_done = on_done

    def begin(self, fetch: Fetch, source: Process, destination: Process, share: float = 1.0) -> None:
        now = self._timeline.now
        copy_s = destination.worker_engine.copy_alone_s(source.worker_engine, len(fetch.blocks), share)
        destination.worker_engine.slow_down(source.worker_engine, now + copy_s, fetch.into_host)
        self._timeline.at(now + copy_s, self._on_done, destination, source, CopyDone(fetch.copy_id, copy_s))


def make_links(table: LinksTable, timeline: Timeline, on_done: OnDone) -> Links:
    match table.rule:
        case "shared":
            return SharedLinks(timeline, on_done)
        case "apart":
            return LinksApart(timeline, on_done)
    return LinksInTurn(timeline, on_done)

"""The pages that are open: all of them get the same snapshots, each made and encoded once.

A page that reads slowly skips snapshots: it gets the newest one when it has read the last. So it holds one snapshot in
memory, and delays no other page and no answer.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from pydantic_core import to_json

from actorserve.http.dashboard.history import POINT_S, History, Point, columns
from actorserve.http.dashboard.host_requests import HostRequests
from actorserve.http.dashboard.snapshot import MAX_REQUESTS, snapshot
from actorserve.http.host_counts import HostCounts
from actorserve.http.service import Service

INTERVAL_S: Final = 0.5
"""Between two snapshots."""
MAX_PAGES: Final = 64
"""As many pages may be open at one gateway."""
_INTERVALS_A_POINT: Final = round(POINT_S / INTERVAL_S)


class Watch:
    """Makes the snapshots while pages are open, and a point of the history every ``POINT_S`` in any case.

    When ``is_stopping()``, streams end, so that open pages do not hold up the end of the gateway.
    """

    def __init__(
        self,
        service: Service,
        counts: HostCounts,
        host_requests: HostRequests,
        is_stopping: Callable[[], bool],
    ) -> None:
        self.num_pages = 0
        self._service = service
        self._history = History(counts.totals)
        self._host_requests = host_requests
        self._is_stopping = is_stopping
        self._number = 0
        self._event = b""
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While this context lasts, there are snapshots."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._run(), name="dashboard")
            yield
            task.cancel()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The stream of one page: the whole history, and then a snapshot every ``INTERVAL_S``, the newest one each
        time, with the points that have come since the last. It ends when the server stops.
        """
        self.num_pages += 1
        try:
            if self.num_pages == 1:
                self._make()
            seen, point = 0, 0
            while not self._is_stopping():
                if self._number == seen:
                    await self._changed.wait()
                    continue
                seen = self._number
                points = [each for each in self._history.points if each.number > point]
                if points:
                    point = points[-1].number
                    yield b"event: points\ndata: %b\n\n" % to_json(_named(points))
                yield self._event
        finally:
            self.num_pages -= 1

    async def _run(self) -> None:
        number = 0
        while True:
            if number % _INTERVALS_A_POINT == 0:
                self._history.add(self._service.shown(MAX_REQUESTS))
            number += 1
            if self.num_pages:
                self._make()
            elif self._host_requests.is_watched():
                shown = self._service.shown(MAX_REQUESTS)
                self._host_requests.tell(shown.requests, shown.num_requests)
            self._wake()
            await asyncio.sleep(INTERVAL_S)

    def _make(self) -> None:
        shown = self._service.shown(MAX_REQUESTS)
        self._host_requests.watch()
        self._host_requests.tell(shown.requests, shown.num_requests)
        others, num_others = self._host_requests.others()
        made = snapshot(shown, others, shown.num_requests + num_others, self._history.rates)
        self._event = b"event: snapshot\ndata: %b\n\n" % to_json(made)
        self._number += 1

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _named(points: list[Point]) -> dict[str, object]:
    return {"every_s": POINT_S, **dict(zip(Point._fields, columns(points), strict=True))}

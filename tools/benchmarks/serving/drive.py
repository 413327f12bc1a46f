"""Sends a workload: open loop, each request at its time, or closed loop, N requests at once."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tools.benchmarks.serving.client import measure_into
from tools.benchmarks.serving.statistics import Outcome


@dataclass(frozen=True, slots=True)
class Job:
    """A request that is ready to be sent."""

    at_s: float
    body: dict[str, Any]


@dataclass
class Drive:
    """One run of jobs against a path of a server. ``outcomes`` are in sending order, and can be read at any time."""

    client: httpx.AsyncClient
    path: str
    on_end: Callable[[Outcome], None] = lambda _: None
    outcomes: list[Outcome] = field(default_factory=list)

    async def open_loop(self, jobs: Sequence[Job]) -> None:
        """Send each job ``at_s`` after now."""
        begin_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                await asyncio.sleep(begin_s + job.at_s - time.perf_counter())
                group.create_task(self._send(job))

    async def closed_loop(self, jobs: Sequence[Job], concurrency: int) -> None:
        """Keep ``concurrency`` requests running until all are sent."""
        waiting = iter(jobs)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(jobs))):
                group.create_task(self._send_each(waiting))

    async def _send_each(self, waiting: Iterator[Job]) -> None:
        for job in waiting:
            await self._send(job)

    async def _send(self, job: Job) -> None:
        outcome = Outcome(sent_s=time.perf_counter())
        self.outcomes.append(outcome)
        await measure_into(outcome, self.client, self.path, job.body)
        self.on_end(outcome)


async def until_stopped(work: Coroutine[None, None, None], stop: asyncio.Event) -> bool:
    """Do ``work`` until it is done or ``stop`` is set. Returns whether it was stopped."""
    async with asyncio.TaskGroup() as group:
        working = group.create_task(work)
        stopping = group.create_task(_wait(stop))
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopped = not working.done()
        working.cancel()
        stopping.cancel()
    return stopped


async def _wait(event: asyncio.Event) -> None:
    await event.wait()

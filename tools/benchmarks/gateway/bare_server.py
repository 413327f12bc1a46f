"""The least that hypercorn and starlette can do: an endpoint that yields the same event at every step.

Run by ``tools/bench gateway``, to compare with. ``argv[1]`` holds its ``Options`` as JSON. Each line of stdin is the
seconds from one step to the next, and the server ends when stdin ends. It notes its steps in the ``StepClock``, as
``paced_worker`` does.
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import hypercorn.asyncio
import uvloop
from hypercorn.config import Config
from hypercorn.typing import ASGIFramework
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tools.benchmarks.gateway.step_clock import NUM_STEPS, StepClock

_POLL_S = 0.05  # the most by which a new pace comes late


@dataclass(frozen=True, slots=True)
class Options:
    """``event`` is one event of the gateway, with ``{}`` in place of the token's text. Streams take turns at being
    those of one of ``num_workers`` simulated workers.
    """

    num_workers: int
    port: int
    event: str
    texts: Sequence[str]
    clock_file: str
    step_s: float


class _Steps:
    """The steps of one simulated worker, which wake all of its streams."""

    def __init__(self, options: Options, index: int, clock: StepClock) -> None:
        self._index, self._num_workers = index, options.num_workers
        self._step_s = options.step_s
        self._next_s = 0.0
        self._num_steps = 0
        before, _, after = options.event.partition("{}")
        self._events = [f"{before}{text}{after}".encode() for text in options.texts]
        self._clock = clock
        self._stepped = asyncio.Event()

    def pace(self, step_s: float, now: float) -> None:
        self._step_s = step_s
        self._next_s = now + step_s * self._index / self._num_workers

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if loop.time() < self._next_s:
                await asyncio.sleep(min(self._next_s - loop.time(), _POLL_S))
                continue
            self._next_s = max(self._next_s + self._step_s, loop.time())
            self._num_steps += 1
            self._clock.note(self._number(self._num_steps), time.monotonic())
            self._stepped.set()
            self._stepped.clear()
            await asyncio.sleep(0)

    async def stream(self) -> AsyncIterator[bytes]:
        step = self._num_steps
        while True:
            while step < self._num_steps:
                step += 1
                yield self._events[self._number(step) % NUM_STEPS]
            await self._stepped.wait()

    def _number(self, step: int) -> int:
        return step * self._num_workers + self._index


async def _run(options: Options) -> None:
    clock = StepClock(Path(options.clock_file))
    workers = [_Steps(options, index, clock) for index in range(options.num_workers)]
    turns = itertools.cycle(workers)

    async def answer(request: Request) -> StreamingResponse:
        await request.body()
        return StreamingResponse(next(turns).stream(), media_type="text/event-stream")

    config = Config()
    config.bind = [f"127.0.0.1:{options.port}"]
    config.backlog = 4096
    config.graceful_timeout = 0.1
    config.loglevel = "ERROR"
    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    ended = asyncio.Event()
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with asyncio.TaskGroup() as group:
        stepping = [group.create_task(worker.run()) for worker in workers]
        group.create_task(hypercorn.asyncio.serve(cast(ASGIFramework, app), config, shutdown_trigger=ended.wait))
        while line := await lines.readline():
            for worker in workers:
                worker.pace(float(line), loop.time())
        ended.set()
        for task in stepping:
            task.cancel()


def main(arguments: Sequence[str]) -> int:
    uvloop.run(_run(Options(**json.loads(arguments[0]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

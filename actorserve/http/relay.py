"""From several token streams to one client: choices side by side, as they come, with little in between.

What waits for a slow client waits in the token streams; here it is a bounded number of pieces. Whatever has come while
the client was busy goes out as one write.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

from starlette.types import Receive

from actorserve.http.choice import Choice, Finish, Piece
from actorserve.http.metrics import RequestMeter
from actorserve.http.service import Produced, TokenStream

_MAX_WAITING_EVENTS = 64


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """What happened to choice ``index`` of an answer."""

    index: int
    event: Piece | Finish


@dataclass(frozen=True, slots=True)
class Source:
    """A choice, where its tokens come from, and what is measured of it."""

    choice: Choice
    stream: TokenStream
    meter: RequestMeter

    def release(self) -> None:
        """Nothing more is wanted. Idempotent."""
        self.stream.release()
        self.meter.released()


class Writer(Protocol):
    """Takes what happens to the choices of one answer, and writes it to the client."""

    async def write(self, events: Sequence[ChoiceEvent]) -> bool:
        """Take the next events, in order. False: the answer is over, before its choices are."""
        ...

    async def idle(self) -> None:
        """Nothing has happened for a while."""
        ...

    async def end(self) -> None:
        """All choices have finished."""
        ...


async def relay(sources: Sequence[Source], writer: Writer, idle_s: float) -> None:
    """Write all that the sources give, until each has finished or the writer has had enough."""
    waiting: asyncio.Queue[ChoiceEvent] = asyncio.Queue(_MAX_WAITING_EVENTS)
    async with asyncio.TaskGroup() as group:
        pumps = [group.create_task(_pump(source, waiting)) for source in sources]
        num_open = len(sources)
        while num_open > 0:
            events = await _take(waiting, idle_s)
            if not events:
                await writer.idle()
            elif not await writer.write(events):
                break
            num_open -= sum(isinstance(each.event, Finish) for each in events)
        else:
            await writer.end()
        for pump in pumps:
            pump.cancel()


async def until_disconnect(receive: Receive, work: Coroutine[object, object, None]) -> None:
    """Do ``work``, or as much of it as the client stays for. The request's body must have been read."""
    async with asyncio.TaskGroup() as group:
        working = group.create_task(work)
        leaving = group.create_task(_disconnected(receive))
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        leaving.cancel()


async def _pump(source: Source, waiting: asyncio.Queue[ChoiceEvent]) -> None:
    choice = source.choice
    async for item in source.stream:
        if isinstance(item, Produced):
            source.meter.produced(len(item.token_ids), item.num_cached_tokens)
        events = choice.push(item)
        if choice.finish is not None:
            source.meter.finished(choice.finish.reason)
            source.release()  # a stop string ends a request that would go on
        for event in events:
            await waiting.put(ChoiceEvent(choice.index, event))
        if choice.finish is not None:
            return
    raise RuntimeError("a token stream ended without saying so")


async def _take(waiting: asyncio.Queue[ChoiceEvent], timeout_s: float) -> list[ChoiceEvent]:
    """All that has come, waiting for the first if there is none; empty after ``timeout_s`` of silence."""
    events: list[ChoiceEvent] = []
    if waiting.empty():
        try:
            async with asyncio.timeout(timeout_s):
                events.append(await waiting.get())
        except TimeoutError:
            return events
    while not waiting.empty():
        events.append(waiting.get_nowait())
    return events


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""An answer's stream: the effects of all its choices in one queue, while its client is fast or slow."""

import asyncio
import json
from collections.abc import Sequence

from starlette.types import Message

from actorserve.core.effects import Deliver, End
from actorserve.http.openai.chunks import LOWEST_LOGPROB, finite
from actorserve.http.stream import AnswerStream
from tests.http.fakes import DEADLINE_S, ScriptedService, app_for, one_by_one


async def take(stream: AnswerStream, patience_s: float = DEADLINE_S) -> Sequence[Deliver | End]:
    return await stream.take(asyncio.get_running_loop().time() + patience_s)


async def test_effects_come_in_order_and_all_that_wait_come_together() -> None:
    """``take`` waits for the first effect, and then returns all effects that have come."""
    stream = AnswerStream()
    taking = asyncio.create_task(take(stream))
    await asyncio.sleep(0)
    stream.put(Deliver("a", (1,)))
    stream.put(Deliver("b", (2,)))
    assert await taking == [Deliver("a", (1,)), Deliver("b", (2,))]
    assert len(stream) == 0


async def test_silence_gives_nothing() -> None:
    """``take`` of an empty stream returns at its time, and the next ``take`` still gets later effects."""
    stream = AnswerStream()
    assert await take(stream, 0.001) == []
    stream.put(Deliver("a", (1,)))
    assert await take(stream) == [Deliver("a", (1,))]


async def test_a_long_backlog_comes_in_parts() -> None:
    """``take`` returns at most 64 effects, so that no answer blocks the event loop for long."""
    stream = AnswerStream()
    effects = [Deliver("a", (i,)) for i in range(100)]
    for effect in effects:
        stream.put(effect)
    first, second = await take(stream), await take(stream)
    assert len(first) == 64
    assert [*first, *second] == effects


async def test_effects_during_a_write_go_out_as_one_write() -> None:
    """While the client is busy, tokens of all choices wait; then a single write has all of them."""
    service, bodies, reading = ScriptedService(), list[bytes](), asyncio.Event()
    body = json.dumps({"prompt": "x", "n": 2, "stream": True}).encode()
    received: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not received:
            await asyncio.Event().wait()
        return received.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            bodies.append(message["body"])
            await reading.wait()

    path = "/v1/completions"
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [], "root_path": ""}
    answering = asyncio.ensure_future(app_for(service)(scope, receive, send))
    second = await service.request(1)
    first = service.requests[0]
    first.feed_at_once(one_by_one("a")[:1])
    async with asyncio.timeout(DEADLINE_S):
        while not bodies:  # noqa: ASYNC110 - an ASGI app has no event for this
            await asyncio.sleep(0)
    first.feed_at_once(one_by_one("abc")[1:])
    second.feed_at_once(one_by_one("xyz"))
    reading.set()
    await answering
    assert [body.count(b'"text"') for body in bodies] == [1, 7, 0]
    assert bodies[-1] == b"data: [DONE]\n\n"


def test_log_probabilities_are_json_numbers() -> None:
    """JSON has neither infinities nor NaN, so both become the lowest log-probability."""
    assert finite(-0.5) == -0.5
    assert finite(float("-inf")) == finite(float("nan")) == LOWEST_LOGPROB

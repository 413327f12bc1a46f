"""The answer to one client: submits the requests of its choices, and writes their tokens as text.

A token passes from ``Tokens`` on the wire to the core's ``Deliver``, through the answer's queue to a ``Piece`` of its
choice, and from there into the bytes of an event.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

from starlette.types import Receive, Scope, Send

from actorserve.core.effects import Deliver, End
from actorserve.core.messages import FinishReason, RequestSpec
from actorserve.http.answers.choice import Choice
from actorserve.http.answers.off_loop import off_loop_if_large
from actorserve.http.answers.time_limit import time_limit_s, timed_out
from actorserve.http.answers.writers import AnswerWriter, ResponseSender
from actorserve.http.errors import RequestFailedError, failure_of, note_failure
from actorserve.http.metrics.metrics import Metrics
from actorserve.http.metrics.request_meter import RequestMeter
from actorserve.http.record import Record, record_of
from actorserve.http.service import Service
from actorserve.http.stream import AnswerStream

_LAST_WRITE_S = 1.0
"""How long after its time limit an answer may take to send its error, before it is cut off."""


class Answer:
    """An ASGI app for one answer. When its call ends, for whatever reason, all of its requests are released.

    ``choices`` belong to ``specs``, in the same order. After ``keep_alive_s`` of silence a stream gets a comment. An
    answer that is not complete after ``max_answer_s``, or after the time that its client allows, fails; if its client
    does not read, it is cut off.
    """

    def __init__(
        self,
        service: Service,
        metrics: Metrics,
        specs: Sequence[RequestSpec],
        choices: Sequence[Choice],
        make_writer: Callable[[ResponseSender], AnswerWriter],
        keep_alive_s: float,
        max_answer_s: float = math.inf,
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._specs = specs
        self._choices = {spec.request_id: choice for spec, choice in zip(specs, choices, strict=True)}
        self._make_writer = make_writer
        self._keep_alive_s = keep_alive_s
        self._max_answer_s = max_answer_s
        self._stream = AnswerStream()
        self._meters: dict[str, RequestMeter] = {}  # of the requests that were submitted
        self._record = Record()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = self._make_writer(ResponseSender(scope, receive, send))
        self._record = record_of(scope)
        try:
            limit_s = time_limit_s(scope, self._max_answer_s)
        except RequestFailedError as failure:
            await self._fail(writer, failure)
            return
        self._record.choices = self._meters.values()
        try:
            for spec in self._specs:
                meter = self._metrics.begin(spec)
                self._service.submit(spec, self._stream)
                self._meters[spec.request_id] = meter
            await until_disconnect(receive, self._write(writer, limit_s), limit_s + _LAST_WRITE_S)
        finally:
            for request_id in self._meters:
                self._release(request_id)
            if self._meters:
                max(self._meters.values(), key=lambda meter: meter.num_tokens).was_longest()
            self._stream.close()

    async def _write(self, writer: AnswerWriter, limit_s: float) -> None:
        """Write until all choices have ended, one has failed, or ``limit_s`` have passed. Effects that come during a
        write go out together.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + limit_s
        num_open = len(self._choices)
        silent_until = loop.time() + self._keep_alive_s
        waiting: list[Deliver | End] = []  # on choices that wait for their prompt
        while num_open > 0:
            effects = deque(await self._stream.take(min(silent_until, ends_at)))
            while effects:
                effect = effects.popleft()
                choice = self._choices[effect.request_id]
                if choice.end is not None:
                    continue  # the effect came after a stop string
                if choice.awaits_prompt:
                    waiting.append(effect)
                    continue
                if isinstance(effect, Deliver):
                    self._meters[effect.request_id].delivered(effect)
                if isinstance(effect, Deliver) and effect.prompt_logprobs is not None:
                    num_logprobs = len(effect.prompt_logprobs.logprobs)
                    await off_loop_if_large(partial(_add, writer, choice, effect), num_logprobs)
                else:
                    _add(writer, choice, effect)
                if waiting:
                    effects.extendleft(reversed(waiting))
                    waiting.clear()
                if choice.end is not None:
                    self._meters[effect.request_id].ended(choice.end.reason, choice.end.energy)
                    # After a stop string the request would generate further tokens.
                    self._release(effect.request_id, is_complete=choice.end.reason is FinishReason.STOP)
                    failure = failure_of(choice.end)
                    if failure is not None:
                        await self._fail(writer, failure)
                        return
                    writer.finish(choice)
                    num_open -= 1
            if num_open > 0 and loop.time() >= ends_at:
                await self._fail(writer, timed_out(limit_s))
                return
            if not await writer.flush():
                if loop.time() < silent_until:
                    continue
                await writer.keep_alive()
            silent_until = loop.time() + self._keep_alive_s
        await writer.end()

    async def _fail(self, writer: AnswerWriter, failure: RequestFailedError) -> None:
        note_failure(failure, self._record)
        await writer.fail(failure)

    def _release(self, request_id: str, *, is_complete: bool = False) -> None:
        """Release the request, because the client needs no more of its tokens. Idempotent."""
        self._service.release(request_id, is_complete=is_complete)
        self._meters[request_id].released()


def _add(writer: AnswerWriter, choice: Choice, effect: Deliver | End) -> None:
    piece = choice.push(effect)
    if piece is not None:
        writer.add(choice, piece)


async def until_disconnect(receive: Receive, work: Coroutine[object, object, None], limit_s: float) -> None:
    """Do ``work``, but cancel it when the client leaves, or after ``limit_s``, because a write waits for a client that
    does not read. The request's body must have been read.
    """
    async with asyncio.TaskGroup() as group:
        working = group.create_task(work)
        leaving = group.create_task(_disconnected(receive))
        timeout = limit_s if math.isfinite(limit_s) else None
        await asyncio.wait([working, leaving], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        leaving.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""The two ways to answer: a stream of events as the text is made, or all of it at once."""

from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from actorserve.http import sse
from actorserve.http.answer_format import AnswerFormat, Json, WholeChoice, usage_of
from actorserve.http.choice import Finish, Piece
from actorserve.http.errors import RequestFailedError, generation_failed, refused
from actorserve.http.fields import StreamOptions
from actorserve.http.relay import ChoiceEvent
from actorserve.http.translate import Question


class Client:
    """The three ends of an ASGI exchange, kept together."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send

    async def answer(self, response: JSONResponse) -> None:
        """Send a whole response."""
        await response(self._scope, self._receive, self._send)

    async def start_stream(self) -> None:
        """Send the status and headers of a stream of events."""
        headers = {"content-type": f"{sse.MEDIA_TYPE}; charset=utf-8", **sse.HEADERS}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def send_events(self, body: bytes, *, more: bool = True) -> None:
        """Send some bytes of a stream; waits for a client that does not read."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


class _TokenCount:
    """Tokens that the choices of an answer have made so far, and those that they found in a prefix cache."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._num_tokens = [0] * len(question.specs)
        self._num_cached_tokens = [0] * len(question.specs)

    def take(self, happened: ChoiceEvent) -> None:
        self._num_tokens[happened.index] = happened.event.num_tokens
        self._num_cached_tokens[happened.index] = happened.event.num_cached_tokens

    def usage(self) -> Json:
        # A prompt's first choice tells what was there before the question; the others find what that one computed.
        num_cached_tokens = sum(self._num_cached_tokens[:: self._question.choices_per_prompt])
        return usage_of(self._question.num_prompt_tokens, sum(self._num_tokens), num_cached_tokens)


class EventWriter:
    """Writes a stream. Its status waits for the first event, so that a refusal can still be a plain HTTP error."""

    def __init__(self, client: Client, answer_format: AnswerFormat, question: Question, options: StreamOptions) -> None:
        self._client = client
        self._format = answer_format
        self._options = options
        self._count = _TokenCount(question)
        self._opened = [False] * len(question.specs)
        self._started = False

    async def write(self, events: Sequence[ChoiceEvent]) -> bool:
        failure = _failure_in(events)
        if failure is not None and not self._started:
            await self._client.answer(failure.response())
            return False
        frames: list[bytes] = []
        for happened in events:
            self._count.take(happened)
            if isinstance(happened.event, Finish) and happened.event.failed:
                break
            self._spell(happened, frames)
        await self._start()
        if failure is not None:
            frames += [sse.event(failure.body()), sse.DONE]
        await self._client.send_events(b"".join(frames), more=failure is None)
        return failure is None

    async def idle(self) -> None:
        await self._start()
        await self._client.send_events(sse.KEEP_ALIVE)

    async def end(self) -> None:
        frames = []
        if self._options.include_usage:
            frames.append(sse.event(self._format.usage(self._count.usage())))
        frames.append(sse.DONE)
        await self._client.send_events(b"".join(frames), more=False)

    async def _start(self) -> None:
        if not self._started:
            self._started = True
            await self._client.start_stream()

    def _spell(self, happened: ChoiceEvent, frames: list[bytes]) -> None:
        index = happened.index
        if not self._opened[index]:
            self._opened[index] = True
            opening = self._format.opening(index)
            if opening is not None:
                frames.append(self._event(opening))
        if isinstance(happened.event, Piece):
            frames.append(self._event(self._format.piece(index, happened.event)))
        else:
            frames.append(self._event(self._format.finish(index, happened.event.reason)))

    def _event(self, chunk: Json) -> bytes:
        if self._options.continuous_usage_stats:
            chunk["usage"] = self._count.usage()
        elif self._options.include_usage:
            chunk["usage"] = None
        return sse.event(chunk)


class WholeWriter:
    """Collects the choices, and answers when all of them have finished, or one has failed."""

    def __init__(self, client: Client, answer_format: AnswerFormat, question: Question) -> None:
        self._client = client
        self._format = answer_format
        self._count = _TokenCount(question)
        self._choices = [WholeChoice() for _ in question.specs]

    async def write(self, events: Sequence[ChoiceEvent]) -> bool:
        failure = _failure_in(events)
        if failure is not None:
            await self._client.answer(failure.response())
            return False
        for happened in events:
            self._count.take(happened)
            choice = self._choices[happened.index]
            if isinstance(happened.event, Piece):
                choice.add(happened.event)
            else:
                choice.finish_reason = happened.event.reason
        return True

    async def idle(self) -> None:
        """A whole answer has no room for signs of life."""

    async def end(self) -> None:
        await self._client.answer(JSONResponse(self._format.whole(self._choices, self._count.usage())))


def _failure_in(events: Sequence[ChoiceEvent]) -> RequestFailedError | None:
    """The error that the first failed choice stands for, if any has failed."""
    for happened in events:
        match happened.event:
            case Finish(refusal=None, failed=True):
                return generation_failed()
            case Finish(refusal=reason) as finish if reason is not None:
                return refused(reason, finish.retry_after_s)
            case _:
                pass
    return None

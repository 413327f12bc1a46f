"""The two ways to answer: a stream of events during generation, or one JSON object at the end."""

from typing import Protocol

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from actorserve.http.answers import sse
from actorserve.http.answers.answer_format import AnswerFormat, AnswerHead, Json, Usage, WholeChoice
from actorserve.http.answers.choice import Choice, Piece
from actorserve.http.errors import RequestFailedError
from actorserve.http.requests.fields import StreamOptions


class AnswerWriter(Protocol):
    """Writes the choices of one answer to its client. Ends with ``end`` or ``fail``."""

    def add(self, choice: Choice, piece: Piece) -> None:
        """The choice's next text."""
        ...

    def finish(self, choice: Choice) -> None:
        """The choice has ended without an error."""
        ...

    async def flush(self) -> bool:
        """Send the text that was added, and wait for a slow client. Returns whether there was anything to send."""
        ...

    async def keep_alive(self) -> None:
        """Send a sign of life, because nothing was sent for a while."""
        ...

    async def end(self) -> None:
        """All choices have ended."""
        ...

    async def fail(self, failure: RequestFailedError) -> None:
        """A choice has failed, so the whole answer fails."""
        ...


class ResponseSender:
    """Sends an ASGI response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send

    async def send_whole(self, response: JSONResponse) -> None:
        await response(self._scope, self._receive, self._send)

    async def start_events(self) -> None:
        """Send the status and headers of a stream of events."""
        headers = {"content-type": f"{sse.MEDIA_TYPE}; charset=utf-8", **sse.HEADERS}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def send_events(self, body: bytes, *, more: bool = True) -> None:
        """Send some bytes of a stream; waits for a client that does not read."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


class EventWriter:
    """Writes a stream. Its status waits for the first event, so that a refusal can still be a plain HTTP error."""

    def __init__(
        self,
        sender: ResponseSender,
        answer_format: AnswerFormat,
        head: AnswerHead,
        usage: Usage,
        options: StreamOptions,
    ) -> None:
        self._sender = sender
        self._format = answer_format
        self._chunks = sse.ChunkEvents(head.fields(answer_format.chunk_type))
        self._usage = usage
        self._options = options
        self._opened: set[int] = set()  # choices whose first chunk was written
        self._frames: list[bytes] = []
        self._started = False

    def add(self, choice: Choice, piece: Piece) -> None:
        self._open(choice.index)
        self._write(self._format.piece(choice.index, piece))

    def finish(self, choice: Choice) -> None:
        assert choice.end is not None
        self._open(choice.index)
        self._write(self._format.finish(choice.index, choice.end.reason))

    async def flush(self) -> bool:
        if not self._frames:
            return False
        await self._start()
        body = b"".join(self._frames)
        self._frames.clear()
        await self._sender.send_events(body)
        return True

    async def keep_alive(self) -> None:
        await self._start()
        await self._sender.send_events(sse.KEEP_ALIVE)

    async def end(self) -> None:
        if self._options.include_usage:
            self._frames.append(self._chunks.event_with_usage(self._usage.fields()))
        await self._end_stream()

    async def fail(self, failure: RequestFailedError) -> None:
        if self._started:
            self._frames.append(sse.event(failure.body()))
            await self._end_stream()
        else:
            await self._sender.send_whole(failure.response())

    async def _start(self) -> None:
        if not self._started:
            self._started = True
            await self._sender.start_events()

    async def _end_stream(self) -> None:
        await self._sender.send_events(b"".join([*self._frames, sse.DONE]), more=False)

    def _open(self, index: int) -> None:
        if index not in self._opened:
            self._opened.add(index)
            opening = self._format.opening(index)
            if opening is not None:
                self._write(opening)

    def _write(self, choice: Json) -> None:
        if self._options.continuous_usage_stats:
            frame = self._chunks.event_with_usage(self._usage.fields(), choice)
        elif self._options.include_usage:
            frame = self._chunks.event_with_usage(None, choice)
        else:
            frame = self._chunks.event(choice)
        self._frames.append(frame)


class WholeWriter:
    """Collects the choices, and answers when all of them have ended, or one has failed."""

    def __init__(self, sender: ResponseSender, answer_format: AnswerFormat, head: AnswerHead, usage: Usage) -> None:
        self._sender = sender
        self._format = answer_format
        self._head = head
        self._usage = usage
        self._choices = [WholeChoice() for _ in usage.choices]

    def add(self, choice: Choice, piece: Piece) -> None:
        self._choices[choice.index].add(piece)

    def finish(self, choice: Choice) -> None:
        assert choice.end is not None
        self._choices[choice.index].finish_reason = choice.end.reason

    async def flush(self) -> bool:
        return False

    async def keep_alive(self) -> None:
        """Nothing to do: an answer that is not streamed cannot contain comments."""

    async def end(self) -> None:
        choices = [self._format.whole(index, choice) for index, choice in enumerate(self._choices)]
        fields = self._head.fields(self._format.answer_type)
        await self._sender.send_whole(JSONResponse(fields | {"choices": choices, "usage": self._usage.fields()}))

    async def fail(self, failure: RequestFailedError) -> None:
        await self._sender.send_whole(failure.response())

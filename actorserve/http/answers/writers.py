"""The two ways to answer: a stream of events during generation, or one JSON object at the end."""

from typing import Protocol

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from actorserve.http.answers import sse
from actorserve.http.answers.answer_format import AnswerFormat, WholeChoice
from actorserve.http.answers.choice import Choice, Piece
from actorserve.http.answers.off_loop import off_loop_if_large
from actorserve.http.errors import RequestFailedError


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

    async def send_whole(self, response: Response) -> None:
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

    def __init__(self, sender: ResponseSender, answer_format: AnswerFormat) -> None:
        self._sender = sender
        self._format = answer_format
        self._events: list[bytes] = []
        self._started = False

    def add(self, choice: Choice, piece: Piece) -> None:
        self._write(self._format.piece(choice, piece))

    def finish(self, choice: Choice) -> None:
        self._write(self._format.finish(choice))

    async def flush(self) -> bool:
        if not self._events:
            return False
        await self._start()
        body = b"".join(self._events)
        self._events.clear()
        await self._sender.send_events(body)
        return True

    async def keep_alive(self) -> None:
        await self._start()
        await self._sender.send_events(self._format.keep_alive())

    async def end(self) -> None:
        self._write(self._format.end())
        await self._end_stream()

    async def fail(self, failure: RequestFailedError) -> None:
        if self._started:
            self._write(self._format.fail(failure))
            await self._end_stream()
        else:
            await self._sender.send_whole(self._format.refusal(failure))

    async def _start(self) -> None:
        if not self._started:
            self._started = True
            await self._sender.start_events()

    async def _end_stream(self) -> None:
        await self._start()
        await self._sender.send_events(b"".join(self._events), more=False)

    def _write(self, events: bytes) -> None:
        if events:
            self._events.append(events)


class WholeWriter:
    """Collects the choices, and answers when all of them have ended, or one has failed."""

    def __init__(self, sender: ResponseSender, answer_format: AnswerFormat, num_choices: int) -> None:
        self._sender = sender
        self._format = answer_format
        self._choices = [WholeChoice() for _ in range(num_choices)]

    def add(self, choice: Choice, piece: Piece) -> None:
        self._choices[choice.index].add(piece, choice.num_tokens)

    def finish(self, choice: Choice) -> None:
        self._choices[choice.index].finish(choice)

    async def flush(self) -> bool:
        return False

    async def keep_alive(self) -> None:
        """Nothing to do: an answer that is not streamed cannot contain comments."""

    async def end(self) -> None:
        num_parts = sum(choice.num_logprobs + len(choice.pieces) for choice in self._choices)
        await self._sender.send_whole(await off_loop_if_large(self._response, num_parts))

    async def fail(self, failure: RequestFailedError) -> None:
        await self._sender.send_whole(self._format.refusal(failure))

    def _response(self) -> Response:
        """The JSON encoder of Python's library would take five times as long."""
        return Response(to_json(self._format.whole(self._choices)), media_type="application/json")

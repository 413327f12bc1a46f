"""Sends the chunks of streamed answers straight to the connection.

Between an app's chunk and its socket hypercorn has two events, h11's state machine, a lock and a comparison for each
of them. While a chunked body is being sent, none of them changes anything, so a chunk is framed and written here. h11
sends the head and the end as before.
"""

from http import HTTPMethod, HTTPStatus
from typing import Any, Protocol, cast

from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import ASGISendEvent

_WITHOUT_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)


class Writer(Protocol):
    """The connection of a stream."""

    async def write(self, data: bytes) -> None:
        """Write ``data``, and wait for a slow client. An error of the connection closes it."""
        ...


class DirectStream(HTTPStream):
    """One request and its answer, in HTTP/1."""

    _chunks: Writer | None = None  # while chunks are sent

    async def app_send(self, message: ASGISendEvent | None) -> None:
        if self._chunks is None or message is None or message["type"] != "http.response.body":
            await super().app_send(message)
            if message is not None and message["type"] == "http.response.start" and self._is_chunked(message):
                protocol = cast(Any, self.send).__self__
                self._chunks = protocol.send.__self__
            return
        body = message.get("body", b"")
        if not message.get("more_body", False):
            self._chunks = None
            await super().app_send(message)
        elif body:
            await self._chunks.write(b"%x\r\n%b\r\n" % (len(body), body))

    def _is_chunked(self, start: Any) -> bool:
        """Whether h11 sends the body of this answer in chunks: it does unless the length is known, or there is none."""
        return (
            self.scope["http_version"] == "1.1"
            and self.scope["method"] != HTTPMethod.HEAD
            and start["status"] not in _WITHOUT_BODY
            and not any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in start["headers"])
        )

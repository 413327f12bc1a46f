"""Reading requests' bodies, of which never more than the limits are held: of each one, and of all together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from actorserve.http.errors import RequestFailedError

BODY_TIMEOUT_S = 60.0
"""A body that takes longer to arrive is given up: 8 MiB at 140 kB/s."""
SMALL_BODY_BYTES = 64 * 1024
"""Up to this size a body is always taken: connections bound how many there are, and a crowd of short requests is not
turned away for a few long ones."""
MAX_WHOLE_BODIES = 32
_RETRY_S = 1.0


class BodyReader:
    """Reads bodies of at most ``max_bytes`` each; of the large ones, at most 32 times that at the same time."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._room_bytes = MAX_WHOLE_BODIES * max_bytes

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body. It takes up room until the context ends, for what is made of it is as large.

        Raises: RequestFailedError, 413 as soon as the length is announced or reached; 415 for a body that does not
        claim to be JSON, or is compressed; 408 for one that does not come; 429 for a large one while there is no room.
        ClientDisconnect.
        """
        _check_headers(request, self._max_bytes)
        body = bytearray()
        try:
            await self._receive(request, body)
            yield bytes(body)
        finally:
            self._room_bytes += _room_for(len(body))

    async def _receive(self, request: Request, body: bytearray) -> None:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    self._add(body, message.get("body", b""))
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            raise RequestFailedError(408, "the request's body did not arrive in time", code="body_timeout") from None

    def _add(self, body: bytearray, chunk: bytes) -> None:
        num_bytes = len(body) + len(chunk)
        if num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        room_bytes = _room_for(num_bytes) - _room_for(len(body))
        if room_bytes > self._room_bytes:
            message = "too many large requests are being read; try again later"
            raise RequestFailedError(429, message, code="overloaded", retry_after_s=_RETRY_S)
        self._room_bytes -= room_bytes
        body += chunk


def _room_for(num_bytes: int) -> int:
    return num_bytes if num_bytes > SMALL_BODY_BYTES else 0


def _check_headers(request: Request, max_bytes: int) -> None:
    content_types = request.headers.getlist("content-type")
    if len(content_types) > 1:
        raise RequestFailedError(400, "the header content-type is there more than once", code="duplicate_header")
    # Clients that give no type at all are served; whoever gives one must mean JSON (no form of a web page does).
    media_type = content_types[0].partition(";")[0].strip().lower() if content_types else "application/json"
    if media_type != "application/json":
        raise RequestFailedError(415, "the content-type must be application/json", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise RequestFailedError(415, "compressed bodies are not taken", code="unsupported_encoding")
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > max_bytes):
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> RequestFailedError:
    return RequestFailedError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")

"""Reading requests' bodies within two memory limits: for one body, and for all together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from actorserve.http.errors import RequestFailedError

BODY_TIMEOUT_S = 60.0
"""How long a body may take to arrive: 8 MiB at 140 kB/s."""
SMALL_BODY_BYTES = 64 * 1024
"""Bodies up to this size are always read, so that a few long requests do not block many short ones. The number of
connections bounds their memory."""
MAX_WHOLE_BODIES = 32
_RETRY_S = 1.0


class BodyReader:
    """Reads bodies of at most ``max_bytes`` each. Large bodies together hold at most 32 times that."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._free_bytes = MAX_WHOLE_BODIES * max_bytes

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body. It counts against the shared limit until the context ends, because its parsed form is as
        large.

        Raises: RequestFailedError: 413 as soon as the announced or received length is too large; 415 if the body is not
        declared as JSON, or is compressed; 408 if it does not arrive in time; 429 if large bodies hold all the memory.
        ClientDisconnect.
        """
        _check_headers(request, self._max_bytes)
        body = bytearray()
        try:
            await self._receive(request, body)
            yield bytes(body)
        finally:
            self._free_bytes += _counted_bytes(len(body))

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
        more_bytes = _counted_bytes(num_bytes) - _counted_bytes(len(body))
        if more_bytes > self._free_bytes:
            message = "too many large requests are being read; try again later"
            raise RequestFailedError(429, message, code="overloaded", retry_after_s=_RETRY_S)
        self._free_bytes -= more_bytes
        body += chunk


def _counted_bytes(num_bytes: int) -> int:
    """How much of a body of this size counts against the limit for all."""
    return num_bytes if num_bytes > SMALL_BODY_BYTES else 0


def _check_headers(request: Request, max_bytes: int) -> None:
    content_types = request.headers.getlist("content-type")
    if len(content_types) > 1:
        raise RequestFailedError(400, "the request has more than one content-type header", code="duplicate_header")
    # A request may omit its type. A type that is not JSON is refused, so that no form on a web page can send requests.
    media_type = content_types[0].partition(";")[0].strip().lower() if content_types else "application/json"
    if media_type != "application/json":
        raise RequestFailedError(415, "the content-type must be application/json", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise RequestFailedError(415, "compressed bodies are not supported", code="unsupported_encoding")
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > max_bytes):
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> RequestFailedError:
    return RequestFailedError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")

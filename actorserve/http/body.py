"""Reading a request's body, of which never more than the limit is held."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from actorserve.http.errors import RequestFailedError

BODY_TIMEOUT_S = 60.0
"""A body that takes longer to arrive is given up: 8 MiB at 140 kB/s."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body, at most ``max_bytes`` long.

    Raises: RequestFailedError, 413 as soon as the length is announced or reached; 415 for a body that does not claim
    to be JSON, or is compressed; 408 for one that does not come. ClientDisconnect.
    """
    _check_headers(request, max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk = message.get("body", b"")
                if len(body) + len(chunk) > max_bytes:
                    raise _too_large(max_bytes)
                body += chunk
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise RequestFailedError(408, "the request's body did not arrive in time", code="body_timeout") from None


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

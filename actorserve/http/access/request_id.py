"""``x-request-id``: the id of a request for the client and in our log, sent by the client or generated here."""

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
_SCOPE_KEY = "actorserve.request_id"
_ACCEPTABLE = re.compile(r"[A-Za-z0-9._:+/=@-]{1,128}")


class RequestId:
    """ASGI middleware: every answer carries the client's id, or a new one if that is missing, too long or malformed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _ACCEPTABLE.fullmatch(given) else uuid.uuid4().hex
        scope[_SCOPE_KEY] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(scope: Scope) -> str:
    """The id of the request of this scope."""
    request_id: str = scope[_SCOPE_KEY]
    return request_id

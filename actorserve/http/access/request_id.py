"""``x-request-id``: the id of a request for the client and in our logs, sent by the client or generated here.

What workers compute for a request is named after it (``work_name_of``), so the log of every process has the id. Clients
may send an id twice, so the name of the work adds random digits to it.
"""

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
_SCOPE_KEY = "actorserve.request_id"
_WORK_KEY = "actorserve.work_name"
_NUM_RANDOM_DIGITS = 16
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
        fresh = uuid.uuid4().hex
        is_given = _ACCEPTABLE.fullmatch(given) is not None
        request_id = given if is_given else fresh
        scope[_SCOPE_KEY] = request_id
        scope[_WORK_KEY] = f"{given}.{fresh[:_NUM_RANDOM_DIGITS]}" if is_given else fresh

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(scope: Scope) -> str:
    """The id of the request of this scope."""
    request_id: str = scope[_SCOPE_KEY]
    return request_id


def work_name_of(scope: Scope) -> str:
    """What the ids of the workers' requests for the request of this scope begin with. No other request has it."""
    name: str = scope[_WORK_KEY]
    return name

"""How many requests were answered, by route, method and status: of refused ones nothing else tells."""

from collections.abc import Callable
from http import HTTPMethod
from typing import Final

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CountAnswer = Callable[[str, str, int], None]
"""Takes an answer's route, method and status: ``/v1/models/{name}``, ``GET``, 200."""

_METHODS: Final = frozenset(HTTPMethod)
_OTHER: Final = "none"
"""Stands for every path without a route and every unknown method, so that a client cannot make up labels."""


class AnswerCounts:
    """ASGI middleware: counts each answer when it begins. A request that is refused before its route was looked up, for
    its key, has no route.
    """

    def __init__(self, app: ASGIApp, count: CountAnswer) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"] if scope["method"] in _METHODS else _OTHER
                self._count(_path_of(scope.get("route")), method, message["status"])
            await send(message)

        await self._app(scope, receive, counting_send)


def _path_of(route: BaseRoute | None) -> str:
    return route.path if isinstance(route, Route) else _OTHER

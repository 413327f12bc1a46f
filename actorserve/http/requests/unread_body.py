"""Discards the rest of a request's body if the answer ends before the whole request has arrived.

The server passes chunks to the app through a short queue. If an app answers early (413, 404) and stops reading, that
queue fills up, and the server cannot even tell the app that the connection is closed: app and connection would wait for
each other forever. Also, a connection that is closed with unread bytes is reset, so the client may never see its
answer. So this middleware reads and discards the rest of the body for a limited time, until the answer has been sent.
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_S = 2.0
"""How long a client may keep sending after an early answer, before its connection is closed."""


class DiscardUnreadBody:
    """ASGI middleware around all apps that may answer early."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(receive, send)
        await self._app(scope, exchange.receive, exchange.send)


class _Exchange:
    """One request and its answer. It detects that the answer ends before the request has arrived."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._arrived = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._arrived = True
        return message

    async def send(self, message: Message) -> None:
        ends = message["type"] == "http.response.body" and not message.get("more_body", False)
        if self._arrived or not ends:
            await self._send(message)
            return
        async with asyncio.TaskGroup() as group:
            discarding = group.create_task(self._discard())
            await self._send({**message, "more_body": True})
            await asyncio.wait([discarding], timeout=LINGER_S)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            discarding.cancel()

    async def _discard(self) -> None:
        while not self._arrived:
            await self.receive()

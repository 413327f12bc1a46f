"""``/openapi.json``."""

import asyncio
import json
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from actorserve.http.openapi.document import make_document
from actorserve.http.openapi.operations import OPERATIONS


class OpenAPIEndpoints:
    """The handler of this route. The document is written at the first request."""

    def __init__(self, routes: Sequence[BaseRoute], version: str, *, allows_unknown_fields: bool) -> None:
        """``routes`` are all other routes of the app. The rest is as in ``make_document``."""
        self._routes = [*routes, *self.routes()]
        self._version = version
        self._allows_unknown_fields = allows_unknown_fields
        self._body: bytes | None = None

    def routes(self) -> list[BaseRoute]:
        return [Route("/openapi.json", self._show)]

    async def _show(self, _: Request) -> Response:
        if self._body is None:
            self._body = await asyncio.to_thread(self._write)
        return Response(self._body, media_type="application/json")

    def _write(self) -> bytes:
        document = make_document(
            self._routes, OPERATIONS, self._version, allows_unknown_fields=self._allows_unknown_fields
        )
        return json.dumps(document).encode()

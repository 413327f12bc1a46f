"""Reads requests: their bodies within the memory limits, and what the bodies say."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request

from actorserve.http.requests.body import BodyReader
from actorserve.http.requests.parsing import RequestParser, RequestT
from actorserve.settings import HttpSettings


class RequestReader:
    """What all endpoints that take a body share. ``count_unknown_fields`` gets the number of fields that one ignored.

    Its methods raise RequestFailedError and ClientDisconnect as ``BodyReader`` does, and InvalidRequestError as
    ``RequestParser`` does.
    """

    def __init__(self, settings: HttpSettings, count_unknown_fields: Callable[[int], None]) -> None:
        self._bodies = BodyReader(settings.max_body_bytes)
        self._parser = RequestParser(settings, count_unknown_fields)

    @asynccontextmanager
    async def read(self, request: Request, kind: type[RequestT]) -> AsyncIterator[RequestT]:
        """The request's body as a ``kind``. It counts against the memory of all bodies until the context ends."""
        async with self.read_one_of(request, lambda _: kind) as fields:
            yield fields

    @asynccontextmanager
    async def read_one_of(
        self, request: Request, kind_of: Callable[[dict[str, Any]], type[RequestT]]
    ) -> AsyncIterator[RequestT]:
        """As ``read``, if the kind depends on what the body holds."""
        async with self._bodies.read(request) as body:
            yield await self._parser.parse(kind_of, body)

    def validate(self, kind: type[RequestT], data: dict[str, object]) -> RequestT:
        """As ``RequestParser.validate``."""
        return self._parser.validate(kind, data)

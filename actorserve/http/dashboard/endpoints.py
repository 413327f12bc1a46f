"""The routes of the page to watch: its files, which hold no secret, and its stream, which needs a key to look."""

from contextlib import aclosing
from http import HTTPMethod
from pathlib import Path
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from actorserve.http.access.authentication import check_may_watch
from actorserve.http.answers.sse import HEADERS, MEDIA_TYPE
from actorserve.http.dashboard.watch import MAX_PAGES, Watch
from actorserve.http.errors import RequestFailedError

PAGE_PATH: Final = "/dashboard"
_FOLDER: Final = Path(__file__).parent / "page"
_MEDIA_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES: Final = ("page.css", "page.js", "stream.js", "tiles.js", "marks.js", "charts.js", "icon.svg")
FILE_PATHS: Final = (PAGE_PATH, *(f"{PAGE_PATH}/{name}" for name in _FILES))
"""Anyone may read these: they are the same on every server."""
_RETRY_S: Final = 5.0
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
SECURITY_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


class DashboardEndpoints:
    """The handlers of these routes."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._files = {name: (_FOLDER / name).read_bytes() for name in ("index.html", *_FILES)}

    def routes(self) -> list[BaseRoute]:
        return [
            Route(PAGE_PATH, self._page, include_in_schema=False),
            Route(f"{PAGE_PATH}/events", self._stream, include_in_schema=False),
            Route(f"{PAGE_PATH}/{{file}}", self._file, include_in_schema=False),
        ]

    async def _page(self, _: Request) -> Response:
        return self._answer("index.html")

    async def _file(self, request: Request) -> Response:
        name = request.path_params["file"]
        if name not in _FILES:
            raise HTTPException(404)
        return self._answer(name)

    def _answer(self, name: str) -> Response:
        return Response(self._files[name], headers=SECURITY_HEADERS, media_type=_MEDIA_TYPES[Path(name).suffix])

    async def _stream(self, request: Request) -> Response:
        check_may_watch(request.scope)
        if self._watch.num_pages >= MAX_PAGES:
            message = f"{MAX_PAGES} pages are open already"
            raise RequestFailedError(503, message, code="too_many_pages", retry_after_s=_RETRY_S)
        if request.method == HTTPMethod.HEAD:
            return Response(headers=HEADERS, media_type=MEDIA_TYPE)
        return _Stream(self._watch)


class _Stream(StreamingResponse):
    """The stream of one page, which is closed as soon as its client has left."""

    def __init__(self, watch: Watch) -> None:
        self._events = watch.events()
        super().__init__(self._events, headers=HEADERS, media_type=MEDIA_TYPE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)

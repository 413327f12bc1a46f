"""The routes that tell of the server itself: health, readiness, metrics and version."""

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from actorserve import __version__
from actorserve.http.metrics.metrics import Metrics
from actorserve.http.service import Service


class StatusEndpoints:
    """The handlers of these routes. ``is_stopping``: whether this process was told to end."""

    def __init__(self, service: Service, metrics: Metrics, is_stopping: Callable[[], bool]) -> None:
        self._service = service
        self._metrics = metrics
        self._is_stopping = is_stopping

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/metrics", self._show_metrics),
            Route("/version", self._version),
        ]

    async def _health(self, _: Request) -> Response:
        return self._answer("ok" if self._service.num_instances > 0 else "unavailable")

    async def _ready(self, request: Request) -> Response:
        return self._answer("stopping") if self._is_stopping() else await self._health(request)

    def _answer(self, status: str) -> Response:
        body = {"status": status, "instances": self._service.num_instances}
        return JSONResponse(body, 200 if status == "ok" else 503)

    async def _show_metrics(self, _: Request) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

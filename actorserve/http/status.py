"""The routes that tell of the server itself: health, metrics and version."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from actorserve import __version__
from actorserve.http.metrics.metrics import Metrics
from actorserve.http.service import Service


class StatusEndpoints:
    """The handlers of these routes."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/metrics", self._show_metrics),
            Route("/version", self._version),
        ]

    async def _health(self, _: Request) -> Response:
        healthy = self._service.num_instances > 0
        status = {"status": "ok" if healthy else "unavailable", "instances": self._service.num_instances}
        return JSONResponse(status, 200 if healthy else 503)

    async def _show_metrics(self, _: Request) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

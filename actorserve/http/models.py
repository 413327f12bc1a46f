"""The names of the served model, and its cards: ``/v1/models`` and ``/v1/models/{name}``."""

import time
from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from actorserve.core.messages import ModelInfo
from actorserve.http.errors import RequestFailedError
from actorserve.http.service import Service

_RETRY_S = 1.0


class ServedModels:
    """The model that is up, under its own name and its ``aliases``."""

    def __init__(self, service: Service, aliases: Sequence[str] = ()) -> None:
        self._service = service
        self._aliases = aliases

    def names(self) -> list[str]:
        """All names, the model's own first; empty until a worker has come up for the first time."""
        model = self._service.model
        return [] if model is None else list(dict.fromkeys([model.name, *self._aliases]))

    def find(self, name: str | None) -> ModelInfo:
        """The model of this name, with ``name`` as its name, because an answer repeats the name that its request gave.

        None and an empty name mean the model that is served, under its own name.

        Raises: RequestFailedError: 503 before any worker has come up, 404 for a model that is not served.
        """
        model = self._service.model
        if model is None:
            message = "the model is still being loaded; try again later"
            raise RequestFailedError(503, message, code="model_loading", retry_after_s=_RETRY_S)
        if not name or name == model.name:
            return model
        if name not in self._aliases:
            message = "this model is not served here; /v1/models lists the names of the one that is"
            raise RequestFailedError(404, message, param="model", code="model_not_found")
        return replace(model, name=name)


class ModelEndpoints:
    """The handlers of these routes."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._created_s = int(time.time())

    def routes(self) -> list[BaseRoute]:
        return [Route("/v1/models", self._list), Route("/v1/models/{model:path}", self._show)]

    async def _list(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self._models.names()]})

    async def _show(self, request: Request) -> Response:
        return JSONResponse(self._card(request.path_params["model"]))

    def _card(self, name: str) -> dict[str, object]:
        """A model as OpenAI's clients know it. ``root`` is the model's own name, which tells aliases apart."""
        model = self._models.find(name)
        return {
            "id": model.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "actorserve",
            "root": self._models.find(None).name,
            "parent": None,
            "max_model_len": model.max_tokens,
        }

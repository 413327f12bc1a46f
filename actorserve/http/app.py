"""The HTTP API as one ASGI app."""

import time
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from actorserve.errors import InvalidRequestError
from actorserve.http import errors
from actorserve.http.api_keys import ApiKeys
from actorserve.http.authentication import Authentication
from actorserve.http.chat_template import ChatTemplate
from actorserve.http.endpoints import Endpoints
from actorserve.http.metrics import Metrics
from actorserve.http.request_id import RequestId
from actorserve.http.service import Service
from actorserve.http.translate import Translator
from actorserve.http.unread_body import DiscardUnreadBody
from actorserve.model_files.description import ModelDescription
from actorserve.model_files.tokenizer import Tokenizer
from actorserve.settings import HttpSettings


def create_app(
    service: Service,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    description: ModelDescription,
    settings: HttpSettings,
    *,
    api_keys: ApiKeys | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ASGIApp:
    """The app that serves ``description``'s model through ``service``. ``clock`` measures latencies, in seconds.

    Without a ``template`` chats are refused. With ``api_keys`` every route except ``/health`` needs one of them.
    """
    translator = Translator(service, tokenizer, template, description, settings)
    endpoints = Endpoints(service, tokenizer, translator, Metrics(service, clock), settings)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/completions", endpoints.completion, methods=["POST"]),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/{model:path}", endpoints.model),
            Route("/health", endpoints.health),
            Route("/metrics", endpoints.metrics),
            Route("/version", endpoints.version),
        ],
        exception_handlers={
            InvalidRequestError: errors.on_invalid_request,
            errors.RequestFailedError: errors.on_failed_request,
            HTTPException: errors.on_http_exception,
            ClientDisconnect: _on_client_disconnect,
            Exception: errors.on_unexpected_error,
        },
    )
    app.router.redirect_slashes = False  # because a redirect would name the host that the client sent
    # These middlewares are outermost, so that the answer to an unexpected error passes through them as well.
    return DiscardUnreadBody(RequestId(app if api_keys is None else Authentication(app, api_keys)))


class _NoResponse(Response):
    """Sends nothing, because the client has gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


async def _on_client_disconnect(_: Request, __: Exception) -> Response:
    """The client left before its request was read."""
    return _NoResponse()

"""The HTTP API as one ASGI app."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from actorserve.errors import InvalidRequestError
from actorserve.http import errors
from actorserve.http.access.api_keys import ApiKeys
from actorserve.http.access.authentication import Authentication
from actorserve.http.access.cors import with_cors
from actorserve.http.access.request_id import RequestId
from actorserve.http.answers.answers import Answers
from actorserve.http.chat.dialect import Dialect, ReasoningParserName, ToolParserName
from actorserve.http.chat.template import ChatTemplate
from actorserve.http.generation_check import GenerationCheck
from actorserve.http.metrics.metrics import Metrics
from actorserve.http.models import ModelEndpoints, ServedModels
from actorserve.http.openai.endpoints import OpenAIEndpoints
from actorserve.http.openai.tokenizing import TokenizerEndpoints
from actorserve.http.openai.translate import Translator
from actorserve.http.openapi.endpoints import OpenAPIEndpoints
from actorserve.http.requests.body import BodyReader
from actorserve.http.requests.parsing import RequestParser
from actorserve.http.requests.unread_body import DiscardUnreadBody
from actorserve.http.service import Service
from actorserve.http.status import StatusEndpoints, installed_version
from actorserve.http.structured.checker import GrammarChecker
from actorserve.http.structured.grammars import Grammars
from actorserve.model_files.description import ModelDescription
from actorserve.model_files.grammars import vocabulary_of
from actorserve.model_files.tokenizer import Tokenizer
from actorserve.settings import HttpSettings


def create_app(
    service: Service,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    description: ModelDescription,
    settings: HttpSettings,
    *,
    aliases: Sequence[str] = (),
    tool_parser: ToolParserName = "auto",
    reasoning_parser: ReasoningParserName = "auto",
    api_keys: ApiKeys | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ASGIApp:
    """The app that serves ``description``'s model through ``service``. ``clock`` measures latencies, in seconds.

    Clients may also call the model by its ``aliases``. The parsers find tool calls and thoughts in its text.

    Without a ``template`` chats are refused. With ``api_keys`` every route except ``/health`` needs one of them.
    """
    models = ServedModels(service, aliases)
    dialect = Dialect(template.source if template else None, tokenizer, tool_parser, reasoning_parser)
    vocabulary = partial(vocabulary_of, tokenizer, description.config.vocab_size, description.eos_token_ids)
    grammars = Grammars(GrammarChecker(vocabulary, settings.grammar_timeout_s))
    translator = Translator(models, tokenizer, template, dialect, description, settings, grammars)
    metrics = Metrics(service, clock)
    answers = Answers(service, metrics, tokenizer, settings.keep_alive_s, settings.max_answer_s)
    bodies = BodyReader(settings.max_body_bytes)
    parser = RequestParser(settings, metrics.count_unknown_fields)
    openai = OpenAIEndpoints(tokenizer, translator, answers, bodies, parser)
    status = StatusEndpoints(service, metrics)
    tokenizing = TokenizerEndpoints(tokenizer, translator, bodies, parser)
    groups = (openai, ModelEndpoints(models), tokenizing, status, GenerationCheck(service))
    routes = [route for group in groups for route in group.routes()]
    app = Starlette(
        routes=[*routes, *OpenAPIEndpoints(routes, installed_version()).routes()],
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
    guarded = app if api_keys is None else Authentication(app, api_keys)
    return DiscardUnreadBody(RequestId(with_cors(guarded, settings.cors_origins)))


class _NoResponse(Response):
    """Sends nothing, because the client has gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


async def _on_client_disconnect(_: Request, __: Exception) -> Response:
    """The client left before its request was read."""
    return _NoResponse()

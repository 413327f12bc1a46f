"""The HTTP API as one ASGI app."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from actorserve import __version__
from actorserve.errors import InvalidRequestError
from actorserve.http import errors
from actorserve.http.access.api_keys import ApiKeys
from actorserve.http.access.authentication import Authentication
from actorserve.http.access.cors import with_cors
from actorserve.http.access.hosts import AllowedHosts
from actorserve.http.access.key_limits import KeyLimits
from actorserve.http.access.open_requests import OpenRequests
from actorserve.http.access.request_id import RequestId
from actorserve.http.access.request_log import RequestLog
from actorserve.http.access.tracing import Tracing
from actorserve.http.answers.answers import Answers
from actorserve.http.anthropic.endpoints import MESSAGES_PATH, AnthropicEndpoints
from actorserve.http.anthropic.errors import error_form
from actorserve.http.chat.dialect import Dialect, ReasoningParserName, ToolParserName
from actorserve.http.chat.template import ChatTemplate
from actorserve.http.dashboard.endpoints import FILE_PATHS, DashboardEndpoints
from actorserve.http.dashboard.host_requests import HostRequests
from actorserve.http.dashboard.watch import Watch
from actorserve.http.generation_check import GenerationCheck
from actorserve.http.host_counts import HostCounts
from actorserve.http.metrics.answer_counts import AnswerCounts
from actorserve.http.metrics.metrics import Metrics
from actorserve.http.models import ModelEndpoints, ServedModels
from actorserve.http.openai.endpoints import OpenAIEndpoints
from actorserve.http.openai.prompt_reader import PromptReader
from actorserve.http.openai.responses.endpoints import ResponsesEndpoints
from actorserve.http.openai.tokenizing import TokenizerEndpoints
from actorserve.http.openai.translate import Translator
from actorserve.http.openapi.endpoints import OpenAPIEndpoints
from actorserve.http.requests.reader import RequestReader
from actorserve.http.requests.unread_body import DiscardUnreadBody
from actorserve.http.service import Service
from actorserve.http.status import StatusEndpoints
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
    counts: HostCounts | None = None,
    open_requests: OpenRequests | None = None,
    host_requests: HostRequests | None = None,
    tracing: Tracing | None = None,
    clock: Callable[[], float] = time.monotonic,
    is_stopping: Callable[[], bool] = lambda: False,
) -> ASGIApp:
    """The app that serves ``description``'s model through ``service``. ``clock`` measures latencies, in seconds.
    ``/ready`` tells load balancers to send no more once ``is_stopping()``.

    Clients may also call the model by its ``aliases``. The parsers find tool calls and thoughts in its text.
    ``counts``, ``open_requests`` and ``host_requests`` are shared with the other gateways of the host; by default there
    are none. ``tracing`` makes spans of the requests.

    Without a ``template`` chats are refused. With ``api_keys`` every route except ``/health``, ``/ready``, ``/ping``
    and the dashboard's files needs one of them.
    """
    models = ServedModels(service, aliases)
    dialect = Dialect(template.source if template else None, tokenizer, tool_parser, reasoning_parser)
    vocabulary = partial(vocabulary_of, tokenizer, description.config.vocab_size, description.eos_token_ids)
    grammars = Grammars(GrammarChecker(vocabulary, settings.grammar_timeout_s))
    prompts = PromptReader(tokenizer, template, dialect, settings.max_open_requests)
    translator = Translator(models, prompts, dialect, grammars, description.eos_token_ids, settings.max_prompt_logprobs)
    counts = counts or HostCounts()
    metrics = Metrics(service, clock, counts)
    answers = Answers(service, metrics, tokenizer, settings.keep_alive_s, settings.max_answer_s)
    requests = RequestReader(settings, metrics.count_unknown_fields)
    openai = OpenAIEndpoints(tokenizer, translator, answers, requests)
    responses = ResponsesEndpoints(tokenizer, translator, answers, requests)
    anthropic = AnthropicEndpoints(prompts, translator, answers, requests)
    status = StatusEndpoints(service, metrics, is_stopping)
    watch = Watch(service, counts, host_requests or HostRequests(), is_stopping)
    tokenizing = TokenizerEndpoints(tokenizer, models, prompts, requests)
    groups = (openai, responses, anthropic, ModelEndpoints(models), tokenizing, status, GenerationCheck(service))
    routes = [route for group in groups for route in group.routes()]
    allows_unknown = settings.unknown_fields == "ignore"
    openapi = OpenAPIEndpoints(routes, __version__, allows_unknown_fields=allows_unknown)

    @asynccontextmanager
    async def background(_: Starlette) -> AsyncIterator[None]:
        async with metrics.sharing(), watch.running():
            yield

    app = Starlette(
        lifespan=background,
        routes=[*routes, *openapi.routes(), *DashboardEndpoints(watch).routes()],
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
    guarded: ASGIApp = app
    if api_keys is not None:
        limits = KeyLimits(counts, clock)
        guarded = Authentication(
            app, api_keys, open_requests or OpenRequests(HostCounts()), limits, metrics, FILE_PATHS
        )
    from_here = AllowedHosts(
        with_cors(guarded, settings.cors_origins), (settings.host, *settings.allowed_hosts), settings.cors_origins
    )
    with_forms = errors.ErrorForms(from_here, {MESSAGES_PATH: error_form})
    counted = AnswerCounts(with_forms, metrics.count_answer)
    return DiscardUnreadBody(RequestId(RequestLog(counted, clock, tracing)))


class _NoResponse(Response):
    """Sends nothing, because the client has gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


async def _on_client_disconnect(_: Request, __: Exception) -> Response:
    """The client left before its request was read."""
    return _NoResponse()

"""What each route answers."""

import time
import uuid
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from actorserve.core.messages import RequestSpec
from actorserve.http.answer_format import AnswerFormat, AnswerHead
from actorserve.http.authentication import granted_priority
from actorserve.http.body import BodyReader
from actorserve.http.chat import ChatFormat
from actorserve.http.choice import Choice
from actorserve.http.completions import CompletionFormat
from actorserve.http.detokenizer import Detokenizer
from actorserve.http.fields import SamplingFields, StreamOptions
from actorserve.http.metrics import Metrics
from actorserve.http.relay import Source, Writer, relay, until_disconnect
from actorserve.http.requests import ChatRequest, CompletionRequest, parse_request
from actorserve.http.service import Service
from actorserve.http.translate import Question, Translator
from actorserve.http.writers import Client, EventWriter, WholeWriter
from actorserve.model_files.tokenizer import Tokenizer
from actorserve.settings import HttpSettings


class Endpoints:
    """The handlers, and what they share."""

    def __init__(
        self,
        service: Service,
        tokenizer: Tokenizer,
        translator: Translator,
        metrics: Metrics,
        settings: HttpSettings,
    ) -> None:
        self._service = service
        self._tokenizer = tokenizer
        self._translator = translator
        self._metrics = metrics
        self._settings = settings
        self._bodies = BodyReader(settings.max_body_bytes)
        self._created_s = int(time.time())

    async def chat(self, request: Request) -> "Answer":
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        async with self._bodies.read(request) as body:
            asked = await parse_request(ChatRequest, body, self._settings)
            priority = granted_priority(request.scope, asked.priority)
            question = await self._translator.chat(asked, answer_id, priority)
        head = self._head(asked, answer_id, question)
        return Answer(self, question, asked, ChatFormat(head, self._tokenizer))

    async def completion(self, request: Request) -> "Answer":
        answer_id = f"cmpl-{uuid.uuid4().hex}"
        async with self._bodies.read(request) as body:
            asked = await parse_request(CompletionRequest, body, self._settings)
            priority = granted_priority(request.scope, asked.priority)
            question = await self._translator.completion(asked, answer_id, priority)
        head = self._head(asked, answer_id, question)
        return Answer(self, question, asked, CompletionFormat(head, self._tokenizer))

    async def models(self, _: Request) -> Response:
        model = self._service.model
        return JSONResponse({"object": "list", "data": [] if model is None else [self._card(None)]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._card(request.path_params["model"]))

    async def health(self, _: Request) -> Response:
        healthy = self._service.num_instances > 0
        status = {"status": "ok" if healthy else "unavailable", "instances": self._service.num_instances}
        return JSONResponse(status, 200 if healthy else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": _version()})

    def ask(self, index: int, spec: RequestSpec, stop: Sequence[str]) -> Source:
        """Ask for choice ``index`` of an answer. The caller releases the source, whatever happens."""
        detokenizer = Detokenizer(self._tokenizer, spec.prompt_token_ids)
        choice = Choice(spec.sampling, detokenizer, stop, index)
        meter = self._metrics.begin(len(spec.prompt_token_ids))
        return Source(choice, self._service.submit(spec), meter)

    @property
    def keep_alive_s(self) -> float:
        return self._settings.keep_alive_s

    def _card(self, name: str | None) -> dict[str, object]:
        model = self._translator.model(name)
        return {
            "id": model.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "actorserve",
            "max_model_len": model.max_tokens,
        }

    def _head(self, asked: SamplingFields, answer_id: str, question: Question) -> AnswerHead:
        model = self._translator.model(asked.model)
        wants_logprobs = question.specs[0].sampling.top_logprobs >= 0
        return AnswerHead(answer_id, int(time.time()), model.name, wants_logprobs)


class Answer:
    """The response to a question, as an ASGI app: asks when it is called, and lets go of everything when it ends."""

    def __init__(
        self, endpoints: Endpoints, question: Question, asked: SamplingFields, answer_format: AnswerFormat
    ) -> None:
        self._endpoints = endpoints
        self._question = question
        self._asked = asked
        self._format = answer_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sources: list[Source] = []
        try:
            for index, spec in enumerate(self._question.specs):
                sources.append(self._endpoints.ask(index, spec, self._asked.stop))
            work = relay(sources, self._writer(Client(scope, receive, send)), self._endpoints.keep_alive_s)
            await until_disconnect(receive, work)
        finally:
            # However it ended: answered, refused, cancelled, or left by its client.
            for source in sources:
                source.release()

    def _writer(self, client: Client) -> Writer:
        if self._asked.stream:
            options = self._asked.stream_options or StreamOptions()
            return EventWriter(client, self._format, self._question, options)
        return WholeWriter(client, self._format, self._question)


def _version() -> str:
    try:
        return version("actorserve")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"

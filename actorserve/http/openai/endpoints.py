"""The handlers of OpenAI's routes."""

import time
import uuid

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from actorserve.http.access.authentication import granted_priority
from actorserve.http.answers.answer import Answer
from actorserve.http.answers.answer_format import AnswerFormat, AnswerHead, Usage
from actorserve.http.answers.choice import Choice
from actorserve.http.answers.detokenizer import Detokenizer
from actorserve.http.answers.writers import AnswerWriter, EventWriter, ResponseSender, WholeWriter
from actorserve.http.metrics.metrics import Metrics
from actorserve.http.openai.chat import ChatFormat
from actorserve.http.openai.completions import CompletionFormat
from actorserve.http.openai.requests import ChatRequest, CompletionRequest
from actorserve.http.openai.translate import Translator, WorkerRequests
from actorserve.http.requests.body import BodyReader
from actorserve.http.requests.fields import SamplingFields, StreamOptions
from actorserve.http.requests.parsing import RequestParser
from actorserve.http.service import Service
from actorserve.model_files.tokenizer import Tokenizer
from actorserve.settings import HttpSettings


class OpenAIEndpoints:
    """The handlers of these routes."""

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
        self._parser = RequestParser(settings, metrics.count_unknown_fields)
        self._bodies = BodyReader(settings.max_body_bytes)
        self._created_s = int(time.time())

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completion, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._model),
        ]

    async def _chat(self, request: Request) -> Answer:
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        async with self._bodies.read(request) as body:
            fields = await self._parser.parse(ChatRequest, body)
            priority = granted_priority(request.scope, fields.priority)
            work = await self._translator.chat(fields, answer_id, priority)
        return self._answer(fields, work, answer_id, ChatFormat(self._tokenizer, work.wants_logprobs))

    async def _completion(self, request: Request) -> Answer:
        answer_id = f"cmpl-{uuid.uuid4().hex}"
        async with self._bodies.read(request) as body:
            fields = await self._parser.parse(CompletionRequest, body)
            priority = granted_priority(request.scope, fields.priority)
            work = await self._translator.completion(fields, answer_id, priority)
        return self._answer(fields, work, answer_id, CompletionFormat(self._tokenizer, work.wants_logprobs))

    async def _models(self, _: Request) -> Response:
        model = self._service.model
        return JSONResponse({"object": "list", "data": [] if model is None else [self._card(None)]})

    async def _model(self, request: Request) -> Response:
        return JSONResponse(self._card(request.path_params["model"]))

    def _answer(
        self, fields: SamplingFields, work: WorkerRequests, answer_id: str, answer_format: AnswerFormat
    ) -> Answer:
        head = AnswerHead(answer_id, int(time.time()), self._translator.model(fields.model).name)
        choices = [
            Choice(spec, Detokenizer(self._tokenizer, spec.prompt_token_ids), fields.stop, index)
            for index, spec in enumerate(work.specs)
        ]
        usage = Usage(choices, work.num_prompt_tokens, work.choices_per_prompt)

        def make_writer(sender: ResponseSender) -> AnswerWriter:
            if fields.stream:
                return EventWriter(sender, answer_format, head, usage, fields.stream_options or StreamOptions())
            return WholeWriter(sender, answer_format, head, usage)

        keep_alive_s = self._settings.keep_alive_s
        return Answer(self._service, self._metrics, work.specs, choices, make_writer, keep_alive_s)

    def _card(self, name: str | None) -> dict[str, object]:
        model = self._translator.model(name)
        return {
            "id": model.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "actorserve",
            "max_model_len": model.max_tokens,
        }

"""The handlers of all routes."""

import time
import uuid
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from actorserve.http.answer import Answer
from actorserve.http.answer_format import AnswerFormat, AnswerHead, Usage
from actorserve.http.authentication import granted_priority
from actorserve.http.body import BodyReader
from actorserve.http.chat import ChatFormat
from actorserve.http.choice import Choice
from actorserve.http.completions import CompletionFormat
from actorserve.http.detokenizer import Detokenizer
from actorserve.http.fields import SamplingFields, StreamOptions
from actorserve.http.metrics import Metrics
from actorserve.http.requests import ChatRequest, CompletionRequest, parse_request
from actorserve.http.service import Service
from actorserve.http.translate import Translator, WorkerRequests
from actorserve.http.writers import AnswerWriter, EventWriter, ResponseSender, WholeWriter
from actorserve.model_files.tokenizer import Tokenizer
from actorserve.settings import HttpSettings


class Endpoints:
    """The handlers and their shared state."""

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

    async def chat(self, request: Request) -> Answer:
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        async with self._bodies.read(request) as body:
            fields = await parse_request(ChatRequest, body, self._settings)
            priority = granted_priority(request.scope, fields.priority)
            work = await self._translator.chat(fields, answer_id, priority)
        return self._answer(fields, work, answer_id, ChatFormat(self._tokenizer, work.wants_logprobs))

    async def completion(self, request: Request) -> Answer:
        answer_id = f"cmpl-{uuid.uuid4().hex}"
        async with self._bodies.read(request) as body:
            fields = await parse_request(CompletionRequest, body, self._settings)
            priority = granted_priority(request.scope, fields.priority)
            work = await self._translator.completion(fields, answer_id, priority)
        return self._answer(fields, work, answer_id, CompletionFormat(self._tokenizer, work.wants_logprobs))

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


def _version() -> str:
    try:
        return version("actorserve")
    except PackageNotFoundError:  # we run from a source tree that is not installed
        return "unknown"

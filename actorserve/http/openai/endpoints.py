"""The handlers of OpenAI's routes."""

import time
import uuid
from collections.abc import Callable

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from actorserve.http.access.authentication import granted
from actorserve.http.answers.answer import Answer
from actorserve.http.answers.answer_format import AnswerFormat
from actorserve.http.answers.answers import Answers
from actorserve.http.answers.usage import Usage
from actorserve.http.answers.worker_requests import WorkerRequests
from actorserve.http.openai.chat.answers import ChatFormat
from actorserve.http.openai.chat.requests import ChatRequest
from actorserve.http.openai.chunks import AnswerHead
from actorserve.http.openai.completions.answers import CompletionFormat
from actorserve.http.openai.completions.requests import CompletionRequest
from actorserve.http.openai.translate import Translator
from actorserve.http.requests.reader import RequestReader
from actorserve.model_files.tokenizer import Tokenizer


class OpenAIEndpoints:
    """The handlers of these routes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        translator: Translator,
        answers: Answers,
        requests: RequestReader,
    ) -> None:
        self._tokenizer = tokenizer
        self._translator = translator
        self._answers = answers
        self._requests = requests

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completion, methods=["POST"]),
        ]

    async def _chat(self, request: Request) -> Answer:
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        async with self._requests.read(request, ChatRequest) as fields:
            grant = granted(request.scope, fields.priority)
            work = await self._translator.chat(fields, grant)
        head = self._head(answer_id, fields.model)

        def make_format(usage: Usage) -> ChatFormat:
            return ChatFormat(head, usage, fields, self._tokenizer, work)

        return self._answer(work, make_format, fields)

    async def _completion(self, request: Request) -> Answer:
        answer_id = f"cmpl-{uuid.uuid4().hex}"
        async with self._requests.read(request, CompletionRequest) as fields:
            grant = granted(request.scope, fields.priority)
            work = await self._translator.completion(fields, grant)
        head = self._head(answer_id, fields.model)

        def make_format(usage: Usage) -> CompletionFormat:
            return CompletionFormat(head, usage, fields, self._tokenizer, work)

        return self._answer(work, make_format, fields)

    def _answer(
        self,
        work: WorkerRequests,
        make_format: Callable[[Usage], AnswerFormat],
        fields: ChatRequest | CompletionRequest,
    ) -> Answer:
        return self._answers.answer(
            work, make_format, fields.stop, stream=fields.stream, wants_token_ids=fields.return_token_ids
        )

    def _head(self, answer_id: str, model: str | None) -> AnswerHead:
        return AnswerHead(answer_id, int(time.time()), self._translator.model(model).name)

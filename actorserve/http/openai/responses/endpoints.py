"""The handlers of the routes below ``/v1/responses``."""

import time
import uuid
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from actorserve.http.access.authentication import granted
from actorserve.http.answers.answer import Answer
from actorserve.http.answers.answer_format import Json
from actorserve.http.answers.answers import Answers
from actorserve.http.answers.choice import AnswerToken
from actorserve.http.answers.usage import Usage
from actorserve.http.errors import RequestFailedError
from actorserve.http.openai.chat.requests import ChatRequest
from actorserve.http.openai.logprobs import shown_logprobs
from actorserve.http.openai.responses.answers import ResponseFormat
from actorserve.http.openai.responses.head import response_head
from actorserve.http.openai.responses.requests import CHAT_FIELDS, ResponsesRequest
from actorserve.http.openai.translate import Translator
from actorserve.http.requests.naming import naming
from actorserve.http.requests.reader import RequestReader
from actorserve.model_files.tokenizer import Tokenizer


class ResponsesEndpoints:
    """The handlers of these routes."""

    def __init__(self, tokenizer: Tokenizer, translator: Translator, answers: Answers, requests: RequestReader) -> None:
        self._tokenizer = tokenizer
        self._translator = translator
        self._answers = answers
        self._requests = requests

    def routes(self) -> list[BaseRoute]:
        one = "/v1/responses/{response_id}"
        return [
            Route("/v1/responses", self._create, methods=["POST"]),
            Route(one, self._stored, methods=["GET", "DELETE"]),
            Route(f"{one}/input_items", self._stored, methods=["GET"]),
            Route(f"{one}/cancel", self._stored, methods=["POST"]),
        ]

    async def _create(self, request: Request) -> Answer:
        response_id = f"resp_{uuid.uuid4().hex}"
        async with self._requests.read(request, ResponsesRequest) as fields:
            grant = granted(request.scope, fields.priority)
            with naming(CHAT_FIELDS):
                chat = self._requests.validate(ChatRequest, fields.to_chat())
                work = await self._translator.chat(chat, grant, at_most=fields.max_output_tokens)
        head = response_head(fields, response_id, self._translator.model(fields.model).name, int(time.time()))

        def show_tokens(tokens: Sequence[AnswerToken]) -> list[Json]:
            return shown_logprobs(tokens, self._tokenizer)

        def make_format(usage: Usage) -> ResponseFormat:
            return ResponseFormat(head, usage, fields.tools, work.new_parser(), show_tokens)

        return self._answers.answer(work, make_format, fields.stop, stream=fields.stream)

    async def _stored(self, _: Request) -> Response:
        message = "this server keeps no responses, so none can be fetched, cancelled or deleted"
        raise RequestFailedError(404, message, param="response_id", code="not_stored")

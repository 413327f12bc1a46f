"""The handlers of the routes below ``/v1/messages``."""

import uuid

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from actorserve.http.access.authentication import granted
from actorserve.http.access.request_id import request_id_of
from actorserve.http.answers.answer import Answer
from actorserve.http.answers.answers import Answers
from actorserve.http.answers.usage import Usage
from actorserve.http.anthropic.answers import MessageFormat
from actorserve.http.anthropic.requests import CHAT_FIELDS, CountTokensRequest, MessagesRequest
from actorserve.http.openai.chat.requests import ChatRequest
from actorserve.http.openai.prompt_reader import PromptReader
from actorserve.http.openai.translate import Translator
from actorserve.http.requests.naming import naming
from actorserve.http.requests.reader import RequestReader

MESSAGES_PATH = "/v1/messages"


class AnthropicEndpoints:
    """The handlers of these routes."""

    def __init__(
        self,
        prompts: PromptReader,
        translator: Translator,
        answers: Answers,
        requests: RequestReader,
    ) -> None:
        self._prompts = prompts
        self._translator = translator
        self._answers = answers
        self._requests = requests

    def routes(self) -> list[BaseRoute]:
        return [
            Route(MESSAGES_PATH, self._message, methods=["POST"]),
            Route(f"{MESSAGES_PATH}/count_tokens", self._count_tokens, methods=["POST"]),
        ]

    async def _message(self, request: Request) -> Answer:
        answer_id = f"msg_{uuid.uuid4().hex}"
        async with self._requests.read(request, MessagesRequest) as fields:
            grant = granted(request.scope, fields.priority)
            with naming(CHAT_FIELDS):
                chat = self._requests.validate(ChatRequest, fields.to_chat())
                work = await self._translator.chat(chat, grant, at_most=fields.max_tokens)
        model = self._translator.model(fields.model).name

        def make_format(usage: Usage) -> MessageFormat:
            return MessageFormat(
                answer_id, model, usage, work.new_parser(), fields.max_tokens, request_id_of(request.scope)
            )

        return self._answers.answer(work, make_format, chat.stop, stream=fields.stream)

    async def _count_tokens(self, request: Request) -> Response:
        async with self._requests.read(request, CountTokensRequest) as fields:
            with naming(CHAT_FIELDS):
                chat = self._requests.validate(ChatRequest, fields.to_chat())
                token_ids = await self._prompts.chat(chat, self._translator.model(fields.model))
        return JSONResponse({"input_tokens": len(token_ids)})

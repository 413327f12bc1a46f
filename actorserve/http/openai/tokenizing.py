"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from actorserve.http.models import ServedModels
from actorserve.http.openai.chat.requests import ChatRequest
from actorserve.http.openai.prompt_reader import PromptReader
from actorserve.http.requests.fields import TokenId, is_token_ids
from actorserve.http.requests.reader import RequestReader
from actorserve.http.requests.strict import StrictFields, null_is, parsed_by, wrong
from actorserve.model_files.tokenizer import Tokenizer


def _parse_tokens(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not is_token_ids(value):
        raise wrong("must be a list of token ids")
    return tuple(value)


class TokenizeText(StrictFields):
    """The body of ``/tokenize`` with a ``prompt``."""

    model: Annotated[str, Field(max_length=256)] | None = None
    prompt: str
    add_special_tokens: Annotated[bool, null_is(True)] = True
    return_token_strs: Annotated[bool, null_is(False)] = False


class TokenizeChat(ChatRequest):
    """The body of ``/tokenize`` with ``messages``: a chat, whose prompt is wanted and not its answer."""

    return_token_strs: Annotated[bool, null_is(False)] = False


class Detokenize(StrictFields):
    """The body of ``/detokenize``."""

    model: Annotated[str, Field(max_length=256)] | None = None
    tokens: Annotated[tuple[int, ...], parsed_by(_parse_tokens, list[TokenId])]


class TokenizerEndpoints:
    """The handlers of these routes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        models: ServedModels,
        prompts: PromptReader,
        requests: RequestReader,
    ) -> None:
        self._tokenizer = tokenizer
        self._models = models
        self._prompts = prompts
        self._requests = requests

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
        ]

    async def _tokenize(self, request: Request) -> Response:
        async with self._requests.read_one_of(request, _kind_of) as fields:
            model = self._models.find(fields.model)
            if isinstance(fields, TokenizeChat):
                token_ids = await self._prompts.chat(fields, model)
            else:
                special = fields.add_special_tokens
                token_ids = await self._prompts.text(fields.prompt, model, add_special_tokens=special)
        wants_names = fields.return_token_strs
        names = [self._tokenizer.token_name(token_id) for token_id in token_ids] if wants_names else None
        return JSONResponse(
            {"count": len(token_ids), "max_model_len": model.max_tokens, "tokens": token_ids, "token_strs": names}
        )

    async def _detokenize(self, request: Request) -> Response:
        async with self._requests.read(request, Detokenize) as fields:
            model = self._models.find(fields.model)
            text = await self._prompts.decode(fields.tokens, model)
        return JSONResponse({"prompt": text})


def _kind_of(body: dict[str, Any]) -> type[TokenizeChat | TokenizeText]:
    return TokenizeText if body.get("messages") is None else TokenizeChat

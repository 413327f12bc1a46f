"""Reads prompts: from a chat, a text or token ids to the tokens that the model reads.

Templates and tokenizing run in other threads, and a bounded number of requests wait for them.
"""

from collections.abc import Iterable, Sequence

from actorserve.core.messages import ModelInfo
from actorserve.errors import InvalidRequestError
from actorserve.http.answers.echo import Echo, make_echo
from actorserve.http.chat.dialect import Dialect
from actorserve.http.chat.template import ChatTemplate
from actorserve.http.openai.chat.prompts import ChatPrompts
from actorserve.http.openai.chat.requests import ChatRequest
from actorserve.http.openai.chat.tool_use import callable_functions
from actorserve.http.openai.completions.requests import CompletionRequest, Prompt
from actorserve.http.requests.prompt_encoder import PromptEncoder
from actorserve.model_files.tokenizer import Tokenizer

_MAX_CONTEXTS = 16  # of a text that is only tokenized

TokenIds = tuple[int, ...]


class PromptReader:
    """Reads at most ``max_at_once`` prompts, or lists of prompts, at a time, and refuses more with 429.

    Its methods raise RequestFailedError for that, and InvalidRequestError for a prompt that does not fit ``model``.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, dialect: Dialect, max_at_once: int) -> None:
        self._tokenizer = tokenizer
        self._chats = None if template is None else ChatPrompts(template, tokenizer, dialect)
        self._dialect = dialect
        self._encoder = PromptEncoder(tokenizer, max_at_once)

    async def chat(self, request: ChatRequest, model: ModelInfo) -> TokenIds:
        """The tokens of a chat. Raises: InvalidRequestError also for what the template refuses."""
        if self._chats is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", code="no_chat_template")
        if len(request.messages) > model.max_tokens:
            raise _far_too_long(model, "messages")  # even if the template rendered every message as a single token
        self._dialect.check(callable_functions(request))
        prompt = await self._chats.render(request)
        return await self._encoder.off_loop(
            lambda: self._encode(prompt.text, prompt.encode_in_parts(), model, "messages"), len(prompt.text)
        )

    async def completion(
        self, request: CompletionRequest, model: ModelInfo
    ) -> tuple[Sequence[TokenIds], tuple[Echo, ...]]:
        """The tokens of each prompt, and what repeats the prompts in the answer, if the client wants that."""
        return await self._encoder.off_loop(lambda: self._completion(request, model), sum(map(len, request.prompt)))

    async def text(self, text: str, model: ModelInfo, *, add_special_tokens: bool) -> TokenIds:
        """The tokens of a text, which may be longer than the context, because clients cut long texts by their tokens.

        Raises: InvalidRequestError for a text of more than 16 contexts.
        """
        limit = _MAX_CONTEXTS * model.max_tokens
        parts = self._tokenizer.encode_in_parts(text, add_special_tokens=add_special_tokens)
        token_ids = await self._encoder.off_loop(lambda: self._encoder.encode(text, parts, limit), len(text))
        if token_ids is None:
            message = f"prompt: has more tokens than {_MAX_CONTEXTS} contexts of {model.max_tokens} tokens"
            raise InvalidRequestError(message, param="prompt", code="context_length_exceeded")
        return token_ids

    async def decode(self, token_ids: Sequence[int], model: ModelInfo) -> str:
        """The text of tokens, special ones included.

        Raises: InvalidRequestError for ids that the model does not have, and for more than fit into its context.
        """
        if len(token_ids) > model.max_tokens:
            raise InvalidRequestError(f"tokens: has more than {model.max_tokens} token ids", param="tokens")
        check_token_ids(token_ids, model, "tokens")
        return await self._encoder.off_loop(
            lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False), len(token_ids)
        )

    def _completion(self, request: CompletionRequest, model: ModelInfo) -> tuple[list[TokenIds], tuple[Echo, ...]]:
        prompts = [self._prompt(prompt, model, request.add_special_tokens) for prompt in request.prompt]
        if not request.echo:
            return prompts, ()
        return prompts, tuple(make_echo(self._tokenizer, prompt, is_all=request.max_tokens == 0) for prompt in prompts)

    def _prompt(self, prompt: Prompt, model: ModelInfo, add_special_tokens: bool) -> TokenIds:
        if isinstance(prompt, str):
            parts = self._tokenizer.encode_in_parts(prompt, add_special_tokens=add_special_tokens)
            return self._encode(prompt, parts, model, "prompt")
        if len(prompt) >= model.max_tokens:
            raise too_long(len(prompt), model, "prompt")
        check_token_ids(prompt, model, "prompt")
        return prompt

    def _encode(self, text: str, parts: Iterable[list[int]], model: ModelInfo, param: str) -> TokenIds:
        """Raises: InvalidRequestError if no room is left for output. That may be known before all tokens are."""
        token_ids = self._encoder.encode(text, parts, model.max_tokens)
        if token_ids is None:
            raise _far_too_long(model, param)
        return token_ids


def check_token_ids(token_ids: Sequence[int], model: ModelInfo, param: str) -> None:
    """Raises: InvalidRequestError that names ``param`` if the model does not have one of the tokens."""
    unknown = next((token_id for token_id in token_ids if not 0 <= token_id < model.vocab_size), None)
    if unknown is not None:
        message = f"{param}: the token id {unknown} is out of vocabulary; the model has {model.vocab_size} tokens"
        raise InvalidRequestError(message, param=param)


def too_long(num_prompt_tokens: int, model: ModelInfo, param: str) -> InvalidRequestError:
    """The error for a prompt that leaves no room for output."""
    return InvalidRequestError(
        f"the prompt's {num_prompt_tokens} tokens leave no room for output in the context of {model.max_tokens} tokens",
        param=param,
        code="context_length_exceeded",
    )


def _far_too_long(model: ModelInfo, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the prompt is longer than the context of {model.max_tokens} tokens, or leaves no room for output",
        param=param,
        code="context_length_exceeded",
    )

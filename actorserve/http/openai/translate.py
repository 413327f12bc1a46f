"""Translates a client's request into requests for the workers: one ``RequestSpec`` per choice.

Tokenizing and templates run in other threads, and a bounded number of requests wait for them. No request is submitted
before all of its prompts are tokenized and known to fit.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from actorserve.core.messages import ModelInfo, RequestSpec, SamplingParams
from actorserve.core.rng import derive_seed
from actorserve.errors import InvalidRequestError
from actorserve.http.answers.echo import Echo, make_echo
from actorserve.http.answers.worker_requests import WorkerRequests
from actorserve.http.chat.dialect import Dialect
from actorserve.http.chat.template import ChatTemplate
from actorserve.http.models import ServedModels
from actorserve.http.openai.chat_grammar import chat_grammar
from actorserve.http.openai.chat_prompts import ChatPrompts
from actorserve.http.openai.completion_request import CompletionRequest, Prompt
from actorserve.http.openai.requests import ChatRequest
from actorserve.http.openai.response_format import grammar_of
from actorserve.http.openai.tool_use import callable_functions, several_calls
from actorserve.http.requests.fields import SamplingFields
from actorserve.http.requests.prompt_encoder import PromptEncoder
from actorserve.http.structured.grammars import Grammars
from actorserve.model_files.description import ModelDescription
from actorserve.model_files.tokenizer import Tokenizer
from actorserve.settings import HttpSettings

DEFAULT_COMPLETION_TOKENS = 16
_MAX_CONTEXTS = 16  # of a text that is only tokenized
_GREEDY_BELOW = 1e-5
"""A lower temperature is greedy, as in vLLM: logits divided by it would overflow."""
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class _Generation:
    """A validated request, with common names for the fields that chats and completions name differently.

    Errors about a prompt name ``prompt_field``. ``scored_prompt`` is the workers' ``prompt_logprobs``.
    """

    fields: SamplingFields
    model: ModelInfo
    prompts: Sequence[tuple[int, ...]]
    prompt_field: str
    max_tokens: int | None
    default_max_tokens: int
    top_logprobs: int
    scored_prompt: int
    choices_per_prompt: int
    grammar: str
    echoes: tuple[Echo, ...] = ()


class Translator:
    """Turns validated requests into worker requests for the model that is up."""

    def __init__(
        self,
        models: ServedModels,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        dialect: Dialect,
        description: ModelDescription,
        settings: HttpSettings,
        grammars: Grammars,
    ) -> None:
        self._models = models
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._chats = None if template is None else ChatPrompts(template, tokenizer, dialect)
        self._dialect = dialect
        self._eos_token_ids = description.eos_token_ids
        self._settings = settings
        self._prompts = PromptEncoder(tokenizer, settings.max_open_requests)

    def model(self, name: str | None) -> ModelInfo:
        """The model of this name. Raises: RequestFailedError, as ``ServedModels.find``."""
        return self._models.find(name)

    async def chat(
        self, request: ChatRequest, answer_id: str, priority: int, at_most: int | None = None
    ) -> WorkerRequests:
        """``at_most`` tokens are generated, or as many as fit the context, unless ``request`` has a limit of its own.

        Raises: InvalidRequestError if the request does not fit the model; RequestFailedError.
        """
        model = self.model(request.model)
        token_ids = await self.chat_prompt(request, model)
        top_logprobs = (request.top_logprobs or 0) if request.logprobs else -1
        max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        generation = _Generation(
            request,
            model,
            [token_ids],
            "messages",
            max_tokens,
            model.max_tokens if at_most is None else at_most,
            top_logprobs,
            -1 if request.prompt_logprobs is None else request.prompt_logprobs,
            request.n,
            await chat_grammar(request, token_ids, self._dialect, self._grammars),
        )
        functions = callable_functions(request)
        return replace(
            self._worker_requests(generation, answer_id, priority),
            new_parser=partial(self._dialect.parser, token_ids, functions, parallel=several_calls(request)),
            marker_ids=self._dialect.marker_ids(with_tools=bool(functions)),
        )

    async def chat_prompt(self, request: ChatRequest, model: ModelInfo) -> tuple[int, ...]:
        """The tokens of a chat as the model reads them. Raises: as ``chat``."""
        if self._chats is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", code="no_chat_template")
        if len(request.messages) > model.max_tokens:
            raise _far_too_long(model, "messages")  # even if the template rendered every message as a single token
        self._dialect.check(callable_functions(request))
        prompt = await self._chats.render(request)
        return await self._prompts.off_loop(
            lambda: self._encode(prompt.text, prompt.encode_in_parts(), model, "messages"), len(prompt.text)
        )

    async def text_prompt(self, text: str, model: ModelInfo, *, add_special_tokens: bool) -> tuple[int, ...]:
        """The tokens of a text, which may be longer than the context, because clients cut long texts by their tokens.

        Raises: InvalidRequestError for a text of more than 16 contexts; RequestFailedError.
        """
        limit = _MAX_CONTEXTS * model.max_tokens
        parts = self._tokenizer.encode_in_parts(text, add_special_tokens=add_special_tokens)
        token_ids = await self._prompts.off_loop(lambda: self._prompts.encode(text, parts, limit), len(text))
        if token_ids is None:
            message = f"prompt: has more tokens than {_MAX_CONTEXTS} contexts of {model.max_tokens} tokens"
            raise InvalidRequestError(message, param="prompt", code="context_length_exceeded")
        return token_ids

    async def text_of(self, token_ids: Sequence[int], model: ModelInfo) -> str:
        """The text of tokens, special ones included.

        Raises: InvalidRequestError for ids that the model does not have, and for more than fit into its context;
        RequestFailedError.
        """
        if len(token_ids) > model.max_tokens:
            raise InvalidRequestError(f"tokens: has more than {model.max_tokens} token ids", param="tokens")
        _check_token_ids(token_ids, model, "tokens")
        return await self._prompts.off_loop(
            lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False), len(token_ids)
        )

    async def completion(self, request: CompletionRequest, answer_id: str, priority: int) -> WorkerRequests:
        """Raises: InvalidRequestError if the request does not fit the model; RequestFailedError."""
        model = self.model(request.model)
        prompts, echoes = await self._prompts.off_loop(
            lambda: self._read_prompts(request, model), sum(map(len, request.prompt))
        )
        generation = _Generation(
            request,
            model,
            prompts,
            "prompt",
            # A worker makes a token even if only the prompt is wanted, because the prompt's scores come with it.
            1 if request.max_tokens == 0 else request.max_tokens,
            DEFAULT_COMPLETION_TOKENS,
            request.top_logprobs,
            request.scored_prompt,
            request.num_generated,
            await grammar_of(request, self._grammars),
            echoes,
        )
        return self._worker_requests(generation, answer_id, priority)

    def _read_prompts(
        self, request: CompletionRequest, model: ModelInfo
    ) -> tuple[list[tuple[int, ...]], tuple[Echo, ...]]:
        prompts = [
            self._read_prompt(prompt, model, add_special_tokens=request.add_special_tokens) for prompt in request.prompt
        ]
        if not request.echo:
            return prompts, ()
        return prompts, tuple(make_echo(self._tokenizer, prompt, is_all=request.max_tokens == 0) for prompt in prompts)

    def _read_prompt(self, prompt: Prompt, model: ModelInfo, *, add_special_tokens: bool) -> tuple[int, ...]:
        if isinstance(prompt, str):
            parts = self._tokenizer.encode_in_parts(prompt, add_special_tokens=add_special_tokens)
            return self._encode(prompt, parts, model, "prompt")
        if len(prompt) >= model.max_tokens:
            raise _too_long(len(prompt), model, "prompt")
        _check_token_ids(prompt, model, "prompt")
        return prompt

    def _encode(self, text: str, parts: Iterable[list[int]], model: ModelInfo, param: str) -> tuple[int, ...]:
        """Raises: InvalidRequestError if no room is left for output. That may be known before all tokens are."""
        token_ids = self._prompts.encode(text, parts, model.max_tokens)
        if token_ids is None:
            raise _far_too_long(model, param)
        return token_ids

    def _worker_requests(self, generation: _Generation, answer_id: str, priority: int) -> WorkerRequests:
        fields, model = generation.fields, generation.model
        _check_token_ids(fields.stop_token_ids, model, "stop_token_ids")
        _check_token_ids([token_id for token_id, _ in fields.logit_bias], model, "logit_bias")
        self._check_scores(generation)
        seed = secrets.randbits(63) if fields.seed is None else fields.seed % 2**64
        salt = fields.cache_salt or ""
        specs: list[RequestSpec] = []
        for prompt in generation.prompts:
            max_tokens = _max_tokens(generation, len(prompt))
            for choice in range(generation.choices_per_prompt):
                sampling = self._sampling(generation, derive_seed(seed, choice), max_tokens)
                request_id = f"{answer_id}-{len(specs)}"
                specs.append(RequestSpec(request_id, prompt, sampling, priority=priority, cache_salt=salt))
        num_prompt_tokens = sum(map(len, generation.prompts))
        return WorkerRequests(tuple(specs), num_prompt_tokens, generation.choices_per_prompt, echoes=generation.echoes)

    def _check_scores(self, generation: _Generation) -> None:
        """Raises: InvalidRequestError if the answer would hold too many log-probabilities of the prompts' tokens."""
        num_tokens = sum(map(len, generation.prompts)) * generation.choices_per_prompt
        num_wanted, most = num_tokens * (1 + generation.scored_prompt), self._settings.max_prompt_logprobs
        if num_wanted > most:
            param = "logprobs" if generation.fields.prompt_logprobs is None else "prompt_logprobs"
            raise InvalidRequestError(
                f"{param}: the answer would hold {num_wanted} log-probabilities of the prompts' tokens, and at most "
                f"{most} are allowed; send fewer or shorter prompts",
                param=param,
            )

    def _sampling(self, generation: _Generation, seed: int, max_tokens: int) -> SamplingParams:
        fields = generation.fields
        eos = () if fields.ignore_eos else self._eos_token_ids
        return SamplingParams(
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=fields.min_tokens,
            temperature=fields.temperature if fields.temperature >= _GREEDY_BELOW else 0.0,
            top_p=fields.top_p,
            top_k=max(fields.top_k, 0),
            min_p=fields.min_p,
            presence_penalty=fields.presence_penalty,
            frequency_penalty=fields.frequency_penalty,
            repetition_penalty=fields.repetition_penalty,
            logit_bias=fields.logit_bias,
            stop_token_ids=tuple(sorted({*fields.stop_token_ids, *eos})),
            top_logprobs=generation.top_logprobs,
            prompt_logprobs=generation.scored_prompt,
            grammar=generation.grammar,
        )


def _max_tokens(generation: _Generation, num_prompt_tokens: int) -> int:
    """How many tokens to generate for a prompt of this length. Raises: InvalidRequestError if they do not fit."""
    model, given = generation.model, generation.max_tokens
    most = _max_output_tokens(num_prompt_tokens, model, generation.prompt_field)
    max_tokens = min(generation.default_max_tokens, most) if given is None else given
    if max_tokens > most:
        raise InvalidRequestError(
            f"max_tokens: {max_tokens} and the prompt's {num_prompt_tokens} tokens do not fit the context of "
            f"{model.max_tokens} tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if generation.fields.min_tokens > max_tokens:
        raise InvalidRequestError(f"min_tokens: more than the {max_tokens} of max_tokens", param="min_tokens")
    return max_tokens


def _max_output_tokens(num_prompt_tokens: int, model: ModelInfo, param: str) -> int:
    """How many tokens may follow a prompt. Raises: InvalidRequestError if the prompt is empty or too long."""
    if num_prompt_tokens == 0:
        raise InvalidRequestError(f"{param}: must have at least one token", param=param)
    if num_prompt_tokens >= model.max_tokens:
        raise _too_long(num_prompt_tokens, model, param)
    return model.max_tokens - num_prompt_tokens


def _too_long(num_prompt_tokens: int, model: ModelInfo, param: str) -> InvalidRequestError:
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


def _check_token_ids(token_ids: Sequence[int], model: ModelInfo, param: str) -> None:
    unknown = next((token_id for token_id in token_ids if not 0 <= token_id < model.vocab_size), None)
    if unknown is not None:
        message = f"{param}: {unknown} is not a token id of the model, whose vocabulary has {model.vocab_size} tokens"
        raise InvalidRequestError(message, param=param)

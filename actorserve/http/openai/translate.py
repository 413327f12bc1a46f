"""Translates a client's request into requests for the workers: one ``RequestSpec`` per choice.

No request is submitted before all of its prompts are tokenized and known to fit.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from actorserve.core.messages import ModelInfo, RequestSpec, SamplingParams
from actorserve.core.rng import derive_seed
from actorserve.errors import InvalidRequestError
from actorserve.http.access.authentication import Grant
from actorserve.http.answers.echo import Echo
from actorserve.http.answers.worker_requests import WorkerRequests
from actorserve.http.chat.dialect import Dialect
from actorserve.http.models import ServedModels
from actorserve.http.openai.chat.grammar import chat_grammar
from actorserve.http.openai.chat.requests import ChatRequest
from actorserve.http.openai.chat.tool_use import callable_functions, must_call, several_calls
from actorserve.http.openai.completions.requests import CompletionRequest
from actorserve.http.openai.prompt_reader import PromptReader, check_token_ids, too_long
from actorserve.http.openai.response_format import grammar_of
from actorserve.http.requests.fields import SamplingFields
from actorserve.http.structured.grammars import Grammars

DEFAULT_COMPLETION_TOKENS = 16
_GREEDY_BELOW = 1e-5
"""A lower temperature is greedy, as in vLLM: logits divided by it would overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    repeats_prompt_ids: bool = False  # once per choice


class Translator:
    """Turns validated requests into worker requests for the model that is up."""

    def __init__(
        self,
        models: ServedModels,
        prompts: PromptReader,
        dialect: Dialect,
        grammars: Grammars,
        eos_token_ids: Sequence[int],
        max_prompt_logprobs: int,
    ) -> None:
        """``max_prompt_logprobs`` log-probabilities of the prompts' tokens may be in one answer."""
        self._models = models
        self._prompts = prompts
        self._dialect = dialect
        self._grammars = grammars
        self._eos_token_ids = eos_token_ids
        self._max_prompt_logprobs = max_prompt_logprobs

    def model(self, name: str | None) -> ModelInfo:
        """The model of this name. Raises: RequestFailedError, as ``ServedModels.find``."""
        return self._models.find(name)

    async def chat(self, request: ChatRequest, grant: Grant, at_most: int | None = None) -> WorkerRequests:
        """``at_most`` tokens are generated, or as many as fit the context, unless ``request`` has a limit of its own.

        Raises: InvalidRequestError if the request does not fit the model; RequestFailedError.
        """
        model = self.model(request.model)
        token_ids = await self._prompts.chat(request, model)
        max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        generation = _Generation(
            fields=request,
            model=model,
            prompts=[token_ids],
            prompt_field="messages",
            max_tokens=max_tokens,
            default_max_tokens=model.max_tokens if at_most is None else at_most,
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else -1,
            scored_prompt=-1 if request.prompt_logprobs is None else request.prompt_logprobs,
            choices_per_prompt=request.n,
            grammar=await chat_grammar(request, token_ids, self._dialect, self._grammars),
        )
        functions = callable_functions(request)
        return replace(
            self._worker_requests(generation, grant),
            new_parser=partial(self._dialect.parser, token_ids, functions, parallel=several_calls(request)),
            may_be_complete=bool(functions) and not (several_calls(request) or must_call(request)),
            marker_ids=self._dialect.marker_ids(with_tools=bool(functions)),
        )

    async def completion(self, request: CompletionRequest, grant: Grant) -> WorkerRequests:
        """Raises: InvalidRequestError if the request does not fit the model; RequestFailedError."""
        model = self.model(request.model)
        prompts, echoes = await self._prompts.completion(request, model)
        generation = _Generation(
            fields=request,
            model=model,
            prompts=prompts,
            prompt_field="prompt",
            # A worker makes a token even if only the prompt is wanted, because the prompt's scores come with it.
            max_tokens=1 if request.max_tokens == 0 else request.max_tokens,
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            top_logprobs=request.top_logprobs,
            scored_prompt=request.scored_prompt,
            choices_per_prompt=request.num_generated,
            grammar=await grammar_of(request, self._grammars),
            echoes=echoes,
            repeats_prompt_ids=request.return_token_ids,
        )
        return self._worker_requests(generation, grant)

    def _worker_requests(self, generation: _Generation, grant: Grant) -> WorkerRequests:
        fields, model = generation.fields, generation.model
        check_token_ids(fields.stop_token_ids, model, "stop_token_ids")
        check_token_ids([token_id for token_id, _ in fields.logit_bias], model, "logit_bias")
        self._check_scores(generation)
        seed = secrets.randbits(63) if fields.seed is None else fields.seed % 2**64
        salt = fields.cache_salt or ""
        specs: list[RequestSpec] = []
        for prompt in generation.prompts:
            max_tokens = _max_tokens(generation, len(prompt))
            for choice in range(generation.choices_per_prompt):
                scored_prompt = generation.scored_prompt if choice == 0 else -1  # the scores are the same for all
                sampling = self._sampling(generation, derive_seed(seed, choice), max_tokens, scored_prompt)
                request_id = f"{grant.work_name}-{len(specs)}"
                spec = RequestSpec(
                    request_id, prompt, sampling, priority=grant.priority, cache_salt=salt, client=grant.client
                )
                specs.append(spec)
        num_prompt_tokens = sum(map(len, generation.prompts))
        return WorkerRequests(tuple(specs), num_prompt_tokens, generation.choices_per_prompt, echoes=generation.echoes)

    def _check_scores(self, generation: _Generation) -> None:
        """Raises: InvalidRequestError if the answer would hold too many numbers about the prompts' tokens."""
        num_tokens = sum(map(len, generation.prompts)) * generation.choices_per_prompt
        num_wanted, most = num_tokens * (1 + generation.scored_prompt), self._max_prompt_logprobs
        if num_wanted > most:
            param = "logprobs" if generation.fields.prompt_logprobs is None else "prompt_logprobs"
            raise InvalidRequestError(
                f"{param}: the answer would hold {num_wanted} log-probabilities of the prompts' tokens, and at most "
                f"{most} are allowed; send fewer or shorter prompts",
                param=param,
            )
        if generation.repeats_prompt_ids and num_tokens > most:
            raise InvalidRequestError(
                f"return_token_ids: the answer would hold {num_tokens} ids of the prompts' tokens, and at most {most} "
                "are allowed; send fewer or shorter prompts",
                param="return_token_ids",
            )

    def _sampling(self, generation: _Generation, seed: int, max_tokens: int, scored_prompt: int) -> SamplingParams:
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
            prompt_logprobs=scored_prompt,
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
        raise too_long(num_prompt_tokens, model, param)
    return model.max_tokens - num_prompt_tokens

"""The body of ``/v1/completions``."""

from typing import Annotated

from pydantic import Field, ValidationInfo, model_validator

from actorserve.http.openai.response_format import StructuredFields
from actorserve.http.requests.fields import TokenId, is_token_ids
from actorserve.http.requests.strict import limits, null_is, only, parsed_by, wrong

Prompt = str | tuple[int, ...]
_Prompts = str | list[str] | list[TokenId] | list[list[TokenId]]


def _parse_prompt(value: object, info: ValidationInfo) -> tuple[Prompt, ...]:
    most = limits(info).max_choices
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise wrong("must be a string, a list of strings, a list of token ids, or a list of those lists")
    if isinstance(value[0], int):
        if not is_token_ids(value):
            raise wrong("has an item that is not a token id")
        return (tuple(value),)
    if len(value) > most:
        raise wrong(f"has more than {most} prompts")
    prompts: list[Prompt] = []
    for item in value:
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and is_token_ids(item):
            prompts.append(tuple(item))
        else:
            raise wrong("must be a string, a list of strings, a list of token ids, or a list of those lists")
    return tuple(prompts)


class CompletionRequest(StructuredFields):
    """``echo`` puts the prompt before each completion. Of ``best_of`` completions of a prompt the ``n`` likeliest are
    returned.
    """

    prompt: Annotated[tuple[Prompt, ...], parsed_by(_parse_prompt, _Prompts)]
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: Annotated[bool, null_is(False)] = False
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Annotated[None, only()] = None
    add_special_tokens: Annotated[bool, null_is(True)] = True
    return_tokens_as_token_ids: Annotated[bool, null_is(False)] = False
    return_token_ids: Annotated[bool, null_is(False)] = False
    return_energy: Annotated[bool, null_is(False)] = False

    @model_validator(mode="after")
    def _completion_fields_agree(self, info: ValidationInfo) -> "CompletionRequest":
        bounds = limits(info)
        if self.logprobs is not None and self.logprobs > bounds.max_top_logprobs:
            raise wrong(f"logprobs: must be at most {bounds.max_top_logprobs}")
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens: 0 only with echo: true, which returns the prompt alone")
        if self.num_generated < self.n:
            raise wrong(f"best_of: must be at least n, which is {self.n}")
        if self.num_generated > self.n and self.stream:
            raise wrong("best_of: more than n only without stream, because the best are known at the end")
        if self.num_generated * len(self.prompt) > bounds.max_choices:
            name = "n" if self.best_of is None else "best_of"
            raise wrong(f"{name}: times the number of prompts must be at most {bounds.max_choices}")
        return self

    @property
    def num_generated(self) -> int:
        """How many completions each prompt gets."""
        return self.n if self.best_of is None else self.best_of

    @property
    def top_logprobs(self) -> int:
        """What workers tell of the output: -1 for nothing. Choosing the best completions needs log-probabilities."""
        if self.logprobs is None:
            return 0 if self.num_generated > self.n else -1
        return self.logprobs

    @property
    def scored_prompt(self) -> int:
        """What workers tell of the prompts, in the same way."""
        echoed = self.logprobs if self.echo and self.logprobs is not None else -1
        return max(echoed, -1 if self.prompt_logprobs is None else self.prompt_logprobs)

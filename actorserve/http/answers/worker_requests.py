"""What the workers must generate for one client's request."""

from collections.abc import Callable
from dataclasses import dataclass

from actorserve.core.messages import RequestSpec
from actorserve.http.answers.echo import Echo
from actorserve.http.chat.deltas import OutputParser, PlainText


@dataclass(frozen=True, slots=True)
class WorkerRequests:
    """The workers' requests for one client's request: a spec per choice, ordered by prompt and then by choice."""

    specs: tuple[RequestSpec, ...]
    num_prompt_tokens: int  # of all prompts; a prompt with several choices counts once
    choices_per_prompt: int
    new_parser: Callable[[], OutputParser] = PlainText
    """Makes the parser of one choice's text."""
    may_be_complete: bool = False
    """Whether the parsers may find an answer complete before the model ends it."""
    marker_ids: frozenset[int] = frozenset()
    """The special tokens that the parsers read. All others are no part of the text."""
    echoes: tuple[Echo, ...] = ()
    """One for each prompt, if the prompts are part of the answers."""

    def echo(self, index: int) -> Echo | None:
        """What precedes the choice of this index."""
        return self.echoes[index // self.choices_per_prompt] if self.echoes else None

    @property
    def wants_logprobs(self) -> bool:
        return self.specs[0].sampling.top_logprobs >= 0

"""What the workers must generate for one client's request."""

from dataclasses import dataclass

from actorserve.core.messages import RequestSpec


@dataclass(frozen=True, slots=True)
class WorkerRequests:
    """The workers' requests for one client's request: a spec per choice, ordered by prompt and then by choice."""

    specs: tuple[RequestSpec, ...]
    num_prompt_tokens: int  # of all prompts; a prompt with several choices counts once
    choices_per_prompt: int

    @property
    def wants_logprobs(self) -> bool:
        return self.specs[0].sampling.top_logprobs >= 0

"""How many tokens an answer has used."""

from collections.abc import Sequence
from dataclasses import dataclass

from actorserve.core.messages import NOTHING_SPENT, Energy, total_energy
from actorserve.http.answers.choice import Choice


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts the tokens and the energy of an answer so far, and names the kinds of its workers. A prompt's tokens count
    once for all of its choices.

    ``choices`` are ordered by prompt, with ``choices_per_prompt`` for each.
    """

    choices: Sequence[Choice]
    num_prompt_tokens: int
    choices_per_prompt: int

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """How many of the prompts' tokens were found in a prefix cache."""
        # A prompt's first choice shows what the cache held before. The other choices also find the KV of the first.
        return sum(choice.num_cached_tokens for choice in self.choices[:: self.choices_per_prompt])

    @property
    def kinds(self) -> Sequence[str]:
        """The kinds of the workers that made the tokens so far, each once."""
        if len(self.choices) == 1:
            return self.choices[0].kinds
        return list(dict.fromkeys(kind for choice in self.choices for kind in choice.kinds))

    @property
    def energy(self) -> Energy | None:
        """What workers spent on all choices. None until all have ended, or if it is not known."""
        total: Energy | None = NOTHING_SPENT
        for choice in self.choices:
            total = total_energy(total, None if choice.end is None else choice.end.energy)
        return total

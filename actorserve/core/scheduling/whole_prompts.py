"""Prompts that are never cut, and come first, for baselines: Splitwise's machines, vLLM before its chunked prefill.

An iteration takes prompts from the front of the order until the next one would exceed ``max_batch_tokens``. A prompt
that exceeds this limit by itself runs whole, without other prompts. No prompt overtakes one that waits for room. The
tokens that the prompts leave go to decodes; the others wait, without a bound, until fewer prompts come.
"""

import math

from actorserve.core.scheduling.token_budget import IterationBudget, TokenBudget
from actorserve.core.timing.step_times import Iteration, StepTimes


class WholePrompts(TokenBudget):
    """Gives each prompt either all of its tokens in one iteration, or none."""

    def __init__(self, max_batch_tokens: int, times: StepTimes) -> None:
        super().__init__(math.inf, max_batch_tokens, times)

    def begin(self, num_decodes: int, num_context_tokens: int) -> "WholePromptsBudget":
        iteration = Iteration(self._times.profile, num_decodes, num_context_tokens)
        return WholePromptsBudget(iteration, math.inf, self._max_batch_tokens, self._times)


class WholePromptsBudget(IterationBudget):
    """The tokens of one iteration while it is planned."""

    __slots__ = ()

    def has_room_for(self, num_wanted: int) -> bool:
        return num_wanted <= self._num_left or not self.iteration.num_tokens

    @property
    def max_decodes(self) -> int | None:
        return max(0, self._num_left) if self.iteration.num_tokens else None

    def take(self, num_wanted: int, num_before: int) -> int:
        if not self.has_room_for(num_wanted):
            return 0
        self.iteration.add_chunk(num_wanted, num_before)
        self._num_left -= num_wanted
        return num_wanted

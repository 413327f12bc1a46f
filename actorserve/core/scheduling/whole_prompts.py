"""Prompts that are never cut, and come first, for baselines: Splitwise's machines, vLLM before its chunked prefill.

An iteration takes prompts from the front of the order until the next one would exceed ``max_batch_tokens``. A prompt
that exceeds this limit by itself runs whole, without other prompts. No prompt overtakes one that waits for room. The
tokens that the prompts leave go to decodes, and the others wait until fewer prompts come, or until they are overdue.

A decode that prompts have kept out of the batch for ``max_wait_s`` is overdue: it goes before all prompts (Splitwise,
section 4.3: a preempted token phase gains priority with its age). So each decode gets its next token within
``max_wait_s`` and one iteration. In the published simulator ageing never has an effect, which is an infinite
``max_wait_s``.
"""

import math
from collections.abc import Collection, Iterable

from actorserve.core.request import Request
from actorserve.core.scheduling.token_budget import MAX_PROMPT_TOKENS, IterationBudget, TokenBudget
from actorserve.core.timing.step_times import Iteration, StepTimes


class WholePrompts(TokenBudget):
    """Gives each prompt either all of its tokens in one iteration, or none."""

    def __init__(self, max_batch_tokens: int, times: StepTimes, max_prompt_tokens: int = MAX_PROMPT_TOKENS) -> None:
        super().__init__(math.inf, max_batch_tokens, times, max_prompt_tokens)

    def begin(self, num_decodes: int, num_context_tokens: int, num_overdue: int = 0) -> "WholePromptsBudget":
        iteration = Iteration(self._times.profile, num_decodes, num_context_tokens)
        return WholePromptsBudget(iteration, self._most_prompt_tokens(num_overdue), num_overdue, self._times)


class WholePromptsBudget(IterationBudget):
    """The tokens of one iteration while it is planned."""

    __slots__ = ("_num_overdue",)

    def __init__(self, iteration: Iteration, num_left: int, num_overdue: int, times: StepTimes) -> None:
        super().__init__(iteration, math.inf, num_left, times)
        self._num_overdue = num_overdue

    def has_room_for(self, num_wanted: int) -> bool:
        return num_wanted <= self._num_left or not self.iteration.num_tokens

    @property
    def max_decodes(self) -> int | None:
        return self._num_overdue + max(0, self._num_left) if self.iteration.num_tokens else None

    def take(self, num_wanted: int, num_before: int) -> int:
        if not self.has_room_for(num_wanted):
            return 0
        self.iteration.add_chunk(num_wanted, num_before)
        self._num_left -= num_wanted
        return num_wanted


class LeftOut:
    """The decodes that prompts keep out of the batch, and since when."""

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._since_s: dict[Request, float] = {}

    def overdue(self, decodes: Iterable[Request], now: float) -> set[Request]:
        """Those of ``decodes`` that have waited too long."""
        if not self._since_s:
            return set()
        return {request for request in decodes if now >= self._since_s.get(request, math.inf) + self._max_wait_s}

    def note(self, left_out: Collection[Request], now: float) -> None:
        """An iteration was planned without these."""
        if left_out or self._since_s:
            self._since_s = {request: self._since_s.get(request, now) for request in left_out}

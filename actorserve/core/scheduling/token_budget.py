"""How many prefill tokens share the next iteration with decodes, so that the decodes get their next token in time.

Sarathi-Serve (Agrawal et al., OSDI 2024), section 4.2, stall-free batching: each iteration takes all decodes first, and
then as much of the waiting prefills, in chunks, as a token budget leaves. Section 4.3 finds this budget once, by
profiling: the largest one whose iteration meets the target for the time between tokens.

Here the budget is found anew for each iteration, from the profile corrected by measured durations
(``core.timing.step_times``). So it follows the number of decodes, the lengths of contexts and prompts, the machine, and
other users of the machine. If no decode runs, no request waits for its next token, and only ``max_batch_tokens`` bounds
the iteration. The same holds on a prompt instance (Splitwise, section 4.3): what decodes there is about to move away,
and would delay all the prompts behind it. But its prefills get at most ``max_prompt_tokens`` in an iteration, because
larger batches compute no more prompt tokens in a second, and all their prompts wait for the last one.
"""

import math

from actorserve.core.timing.step_times import Iteration, StepTimes

MIN_PREFILL_TOKENS = 16
"""The prefills of an iteration together get at least this many tokens, so that a target out of reach cannot stop them.

``max_batch_tokens`` must exceed the largest possible number of decodes by this many; other settings are refused.
"""

MAX_PROMPT_TOKENS = 2048
"""Splitwise's limit for prompt machines (section 4.3)."""

_AIM = 0.95  # of the target, because the duration omits the time between iterations, and noise goes both ways


class TokenBudget:
    """Finds how many prefill tokens fit into the target together with an iteration's decodes."""

    def __init__(
        self, target_s: float, max_batch_tokens: int, times: StepTimes, max_prompt_tokens: int = MAX_PROMPT_TOKENS
    ) -> None:
        """``target_s`` is for an iteration with decodes, infinite for no target; ``max_batch_tokens`` is for all its
        rows, and ``max_prompt_tokens`` for its prefills if prompts go first; ``times`` says how long iterations take.
        """
        self.prompts_first = False  # whether prefills may delay decodes
        self._aim_s = _AIM * target_s
        self._max_prompt_tokens = max_prompt_tokens
        self._max_batch_tokens = max_batch_tokens
        self._times = times

    def begin(self, num_decodes: int, num_context_tokens: int, num_overdue: int = 0) -> "IterationBudget":
        """Plan an iteration with so many decodes, which attend to ``num_context_tokens`` together. ``num_overdue`` of
        them have waited too long, and must get their tokens whatever prefills want.
        """
        iteration = Iteration(self._times.profile, num_decodes, num_context_tokens)
        aim_s = self._aim_s if num_decodes and not self.prompts_first else math.inf
        return IterationBudget(iteration, aim_s, self._most_prompt_tokens(num_decodes), self._times)

    def _most_prompt_tokens(self, num_others: int) -> int:
        """How many tokens prefills may have beside ``num_others`` other tokens."""
        num_left = self._max_batch_tokens - num_others
        return min(num_left, self._max_prompt_tokens) if self.prompts_first else num_left


class IterationBudget:
    """The budget of one iteration while it is planned. Prefills take from it in the order of their urgency."""

    __slots__ = ("_aim_s", "_is_full", "_num_left", "_times", "iteration")

    def __init__(self, iteration: Iteration, aim_s: float, num_left: int, times: StepTimes) -> None:
        """``num_left``: how many tokens the iteration may hold in addition to its decodes."""
        self.iteration = iteration
        self._aim_s = aim_s
        self._is_full = False
        self._num_left = num_left
        self._times = times

    def has_room_for(self, num_wanted: int) -> bool:
        """Whether a prefill that wants ``num_wanted`` tokens gets any of them. If not, no prefill after it may ask."""
        return self._num_left > 0 and not (self._is_full and self.iteration.num_tokens >= MIN_PREFILL_TOKENS)

    @property
    def max_decodes(self) -> int | None:
        """How many decodes the prefills leave tokens for; None if the decodes got theirs first."""
        return None

    def take(self, num_wanted: int, num_before: int) -> int:
        """The next chunk of a prefill that wants ``num_wanted`` tokens and has computed ``num_before``.

        It has at least 1 token if there is room, and otherwise none. The iteration then takes no longer than the
        target, or than with the fewest tokens that the chunk may have.
        """
        if not self.has_room_for(num_wanted):
            return 0
        iteration, times = self.iteration, self._times
        num_taken = most = min(num_wanted, self._num_left)
        if self._aim_s < math.inf:
            least = min(most, max(1, MIN_PREFILL_TOKENS - iteration.num_tokens))
            num_taken = times.num_fitting_tokens(iteration, num_before, self._aim_s, most)
            if num_taken < least:  # the chunk also has those tokens that cost no time in addition
                least_s = times.step_s(iteration.with_chunk(least, num_before))
                num_taken = times.num_fitting_tokens(iteration, num_before, least_s, most)
            self._is_full = num_taken < most
        iteration.add_chunk(num_taken, num_before)
        self._num_left -= num_taken
        return num_taken

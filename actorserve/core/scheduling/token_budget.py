"""How many prefill tokens share the next iteration with decodes, so that the decodes get their next token in time.

Sarathi-Serve (Agrawal et al., OSDI 2024), section 4.2, stall-free batching: each iteration takes all decodes first, and
then as much of the waiting prefills, in chunks, as a token budget leaves. Section 4.3 finds this budget once, by
profiling: the largest one whose iteration meets the target for the time between tokens.

Here the budget is found anew for each iteration, from the profile corrected by measured durations
(``core.timing.step_times``). So it follows the number of decodes, the lengths of contexts and prompts, the machine, and
other users of the machine. If no decode runs, no request waits for its next token, and only ``max_batch_tokens`` bounds
the iteration.
"""

import math

from actorserve.core.timing.step_times import Iteration, StepTimes

MIN_PREFILL_TOKENS = 16
"""The prefills of an iteration together get at least this many tokens, so that a target out of reach cannot stop them.

``max_batch_tokens`` must exceed the largest possible number of decodes by this many; other settings are refused.
"""

_AIM = 0.95  # of the target, because the duration omits the time between iterations, and noise goes both ways


class TokenBudget:
    """Finds how many prefill tokens fit into the target together with an iteration's decodes."""

    def __init__(self, target_s: float, max_batch_tokens: int, times: StepTimes) -> None:
        """``target_s`` is for an iteration with decodes, infinite for no target; ``max_batch_tokens`` is for all its
        rows; ``times`` says how long iterations take.
        """
        self._aim_s = _AIM * target_s
        self._max_batch_tokens = max_batch_tokens
        self._times = times

    def begin(self, num_decodes: int, num_context_tokens: int) -> "IterationBudget":
        """Plan an iteration with so many decodes, which attend to ``num_context_tokens`` together."""
        iteration = Iteration(num_decodes, num_context_tokens)
        aim_s = self._aim_s if num_decodes else math.inf
        return IterationBudget(iteration, aim_s, self._max_batch_tokens - num_decodes, self._times)


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

    @property
    def is_spent(self) -> bool:
        """Whether no prefill gets another token."""
        return self._num_left <= 0 or (self._is_full and self.iteration.num_tokens >= MIN_PREFILL_TOKENS)

    def take(self, num_wanted: int, num_context_tokens: int) -> int:
        """The next chunk of a prefill that wants ``num_wanted`` tokens and has computed ``num_context_tokens``.

        It has at least 1 token while the budget is not spent, and 0 tokens once it is.
        """
        if self.is_spent:
            return 0
        iteration = self.iteration
        num_fitting = math.inf
        if self._aim_s < math.inf:
            left_s = self._aim_s - self._times.step_s(iteration)
            num_fitting = self._times.num_fitting_tokens(iteration, num_context_tokens, left_s)
            self._is_full = num_fitting < num_wanted
        num_least = MIN_PREFILL_TOKENS - iteration.num_tokens
        num_taken = min(num_wanted, self._num_left, max(1, num_least, int(min(num_fitting, self._num_left))))
        iteration.add_chunk(num_taken, num_context_tokens)
        self._num_left -= num_taken
        return num_taken

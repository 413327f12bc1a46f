"""How many prefill tokens share the next iteration with decodes, so that these get their next token in time.

Sarathi-Serve (Agrawal et al., OSDI 2024), section 4.2, stall-free batching: each iteration takes all decodes first, and
then as much of the waiting prefills, in chunks, as a token budget leaves. Section 4.3 finds that budget once, by
profiling, as the largest whose iteration meets the target for the time between tokens.

Here the budget is found anew for each iteration from the measured duration of those before: it follows the number of
decodes, how far their contexts and the prompts have grown, the machine, and whoever else uses it. Where no decode runs
nobody waits for a token, and only ``max_batch_tokens`` bounds the iteration.
"""

import math

MIN_PREFILL_TOKENS = 16
"""What prefills get of an iteration whatever the target, together: one that cannot be met must not stop them.

It takes ``max_batch_tokens`` that leave so many beside the most decodes; settings that do not are refused.
"""

_AIM = 0.95  # of the target: the duration leaves out what lies between iterations, and noise goes both ways
_GAIN = 0.4  # the share of a measured deviation that the next prediction takes over
_MAX_DEVIATION = math.log(2.0)  # taken over from one iteration: more is an outlier, or comes again
_DURATION_BOUNDS_S = (1e-6, 1e3)
_COST_BOUNDS_S = (1e-15, 1e3)
_FIRST_COSTS = (16.0, 1.0, 1e-4, 1.0, 3e-5)  # relative to each other; the first measurement gives them their unit


class TokenBudget:
    """Learns what iterations take, and how many prefill tokens fit into the target.

    The duration is taken to be a sum of costs, each in proportion to one part of the iteration's work. A measurement
    scales each cost by a power of measured over predicted duration, the higher the larger the cost's part is in that
    prediction (as in the multiplicative algebraic reconstruction technique: Gordon, Bender and Herman, 1970). So
    iterations like the last ones are soon predicted rightly, whatever the truth; iterations of decodes or of prefills
    alone tell the costs apart; costs stay positive; and no constant fits one machine only. Deterministic, five numbers
    of state.
    """

    def __init__(self, target_s: float, max_batch_tokens: int) -> None:
        """``target_s``: of an iteration with decodes; infinite for no target. ``max_batch_tokens``: of all its rows."""
        self._aim_s = _AIM * target_s
        self._max_batch_tokens = max_batch_tokens
        self._costs_s: tuple[float, ...] = _FIRST_COSTS
        self._is_measured = False

    def begin(self, num_decodes: int, num_context_tokens: int) -> "IterationBudget":
        """Plan an iteration with these decodes, which attend to so many tokens in all."""
        aim_s = math.inf
        if num_decodes:
            # Where nothing was measured yet, nothing but the minimum fits.
            aim_s = self._aim_s if self._is_measured or math.isinf(self._aim_s) else 0.0
        return IterationBudget(
            self._costs_s, aim_s, self._max_batch_tokens - num_decodes, num_decodes, num_context_tokens
        )

    def observe(self, iteration: "IterationBudget", duration_s: float) -> None:
        """``iteration`` took so long. What cannot be a duration is ignored."""
        if not 0.0 < duration_s < math.inf:
            return
        low, high = _DURATION_BOUNDS_S
        parts = [cost * amount for cost, amount in zip(self._costs_s, iteration.work, strict=True)]
        deviation = math.log(min(max(duration_s, low), high) / sum(parts))
        if self._is_measured:
            deviation = _GAIN * min(max(deviation, -_MAX_DEVIATION), _MAX_DEVIATION)
            largest = max(parts)
            factors = [math.exp(deviation * part / largest) for part in parts]
        else:
            self._is_measured = True
            factors = [math.exp(deviation)] * len(parts)
        low, high = _COST_BOUNDS_S
        self._costs_s = tuple(
            min(max(cost * factor, low), high) for cost, factor in zip(self._costs_s, factors, strict=True)
        )


class IterationBudget:
    """One iteration being planned: prefills take from it in the order of their urgency."""

    __slots__ = ("_context_cost_s", "_left_s", "_num_left", "_token_cost_s", "work")

    def __init__(
        self, costs_s: tuple[float, ...], aim_s: float, num_left: int, num_decodes: int, num_context_tokens: int
    ) -> None:
        """``num_left``: tokens that the iteration may hold beside its decodes."""
        self.work = [1.0, float(num_decodes), float(num_context_tokens), 0.0, 0.0]
        """The iteration as a whole; decodes; tokens that these attend to; prefill tokens; and for each of these the
        tokens before its chunk, summed. (What it attends to in its own chunk is short, and counted with itself.)"""
        self._token_cost_s, self._context_cost_s = costs_s[3:]
        self._left_s = aim_s - sum(cost * amount for cost, amount in zip(costs_s, self.work, strict=True))
        self._num_left = num_left

    @property
    def is_spent(self) -> bool:
        """Whether no prefill gets anything more."""
        return self._num_left <= 0 or (self._left_s <= 0.0 and self.work[3] >= MIN_PREFILL_TOKENS)

    def take(self, num_wanted: int, num_context_tokens: int) -> int:
        """The next chunk of a prefill that wants ``num_wanted`` tokens and has computed ``num_context_tokens``.

        At least 1 while the budget is not spent, and 0 then.
        """
        if self.is_spent:
            return 0
        cost_s = self._token_cost_s + self._context_cost_s * num_context_tokens
        num_fitting = self._left_s / cost_s  # may be infinite
        num_least = MIN_PREFILL_TOKENS - int(self.work[3])
        num_taken = min(num_wanted, self._num_left, max(1, num_least, int(min(num_fitting, self._num_left))))
        self.work[3] += num_taken
        self.work[4] += num_taken * num_context_tokens
        self._left_s -= num_taken * cost_s
        self._num_left -= num_taken
        return num_taken

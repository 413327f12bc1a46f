"""How long iterations and copies take on this engine now: its profile, corrected by measurements while it runs.

The profile gives an iteration's time as a sum of five parts: the floor of any iteration, its decodes, the tokens that
these attend to, its prefill tokens, and the tokens that these attend to before their chunks. Each part has a factor,
which begins at 1. A measurement scales each factor by a power of measured over predicted duration. The power grows with
the part's share of the prediction (the multiplicative algebraic reconstruction technique: Gordon, Bender and Herman,
1970). So predictions soon fit iterations like the last ones, however wrong the profile was; iterations of decodes alone
or prefills alone tell the parts apart; and times stay positive. It is deterministic and has seven numbers of state.
"""

import math
from collections.abc import Sequence

from actorserve.core.timing.profile import Profile

_GAIN = 0.4  # the share of a measured deviation that the next prediction adopts
# The most to adopt from one measurement, because a larger deviation is an outlier or will be measured again.
_MAX_DEVIATION = math.log(2.0)
_LEAST_DEVIATION = 1e-6  # smaller deviations are rounding errors
_DURATION_BOUNDS_S = (1e-6, 1e3)
_FACTOR_BOUNDS = (1e-3, 1e3)


class Iteration:
    """What one iteration computes, as far as its duration depends on it. Chunks are added one by one."""

    __slots__ = ("num_apart", "num_before", "num_context_tokens", "num_decodes", "num_tokens")

    def __init__(self, num_decodes: int, num_context_tokens: int, chunks: Sequence[tuple[int, int]] = ()) -> None:
        """``num_context_tokens``: what the decodes attend to together. ``chunks``: each (tokens, tokens before it)."""
        self.num_decodes = num_decodes
        self.num_context_tokens = num_context_tokens
        self.num_tokens = 0  # in prefill chunks
        self.num_before = 0  # sum, over the prefill tokens, of the tokens before their chunk
        self.num_apart = 0  # pairs of a prefill token and another request's token (``Profile.chunks_s``)
        for num_tokens, num_before in chunks:
            self.add_chunk(num_tokens, num_before)

    def set_decodes(self, num_decodes: int, num_context_tokens: int) -> None:
        """Replace its decodes."""
        self.num_apart += self.num_tokens * (num_decodes - self.num_decodes)
        self.num_decodes, self.num_context_tokens = num_decodes, num_context_tokens

    def add_chunk(self, num_tokens: int, num_context_tokens: int) -> None:
        """Add a prefill chunk with ``num_context_tokens`` tokens before it."""
        self.num_apart += num_tokens * (self.num_decodes + self.num_tokens)
        self.num_before += num_tokens * num_context_tokens
        self.num_tokens += num_tokens


class StepTimes:
    """One instance's times, shared by its scheduler, token budget, swap planner and policy."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._factors = [1.0] * 5
        self._swap_factor = 1.0
        self._transfer_factor = 1.0

    @property
    def min_iteration_s(self) -> float:
        """The shortest iteration: one decode without context. FastServe's first quantum."""
        return self.decode_s(1, 0)

    def prefill_s(self, num_tokens: int, num_context_tokens: int = 0) -> float:
        """Seconds of an iteration that only prefills ``num_tokens`` tokens of one request; 0 for none."""
        if num_tokens <= 0:
            return 0.0
        profile, factors = self.profile, self._factors
        return (
            factors[0] * profile.floor_s
            + factors[3] * (profile.prefill(num_tokens) - profile.floor_s)
            + factors[4] * profile.prefill_context_s * num_tokens * num_context_tokens
        )

    def decode_s(self, num_requests: int, num_context_tokens: int) -> float:
        """Seconds of an iteration that decodes these requests, which attend to that many tokens in all; 0 for none."""
        if not num_requests:
            return 0.0
        profile, factors = self.profile, self._factors
        return (
            factors[0] * profile.floor_s
            + factors[1] * (profile.decode(num_requests) - profile.floor_s)
            + factors[2] * profile.decode_context(num_context_tokens)
        )

    def step_s(self, iteration: Iteration) -> float:
        """Seconds of an iteration of prefill chunks and decodes together."""
        return sum(self._parts(iteration))

    def num_fitting_tokens(self, iteration: Iteration, num_context_tokens: int, budget_s: float) -> float:
        """How many more prefill tokens, of a chunk behind ``num_context_tokens`` tokens, take ``budget_s`` in addition.
        May be infinite. The iteration has decodes.
        """
        if budget_s <= 0.0:
            return 0.0
        profile, factors = self.profile, self._factors
        start = iteration.num_decodes + iteration.num_tokens
        attention_s = profile.prefill_context_s * (factors[4] * num_context_tokens - factors[3] * start)
        return profile.prefill.reach(start, budget_s, factors[3], attention_s)

    def observe(self, iteration: Iteration, duration_s: float) -> None:
        """Learn from the measured duration of ``iteration``. An impossible duration is ignored."""
        parts = self._parts(iteration)
        deviation = _deviation(duration_s, sum(parts))
        if not deviation:
            return
        largest = max(parts)
        low, high = _FACTOR_BOUNDS
        self._factors = [
            min(max(factor * math.exp(deviation * part / largest), low), high)
            for factor, part in zip(self._factors, parts, strict=True)
        ]

    def swap_s(self, num_bytes: int) -> float:
        """Seconds of a copy of ``num_bytes`` to the host, or back."""
        return self._swap_factor * self.profile.swap.copy_s(num_bytes)

    def observe_swap(self, num_bytes: int, duration_s: float) -> None:
        """Learn from the measured duration of such a copy. An impossible duration is ignored."""
        low, high = _FACTOR_BOUNDS
        factor = self._swap_factor * math.exp(_deviation(duration_s, self.swap_s(num_bytes)))
        self._swap_factor = min(max(factor, low), high)

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds of a copy of ``num_bytes`` of KV to another instance."""
        return self._transfer_factor * self.profile.transfer.copy_s(num_bytes)

    def observe_transfer(self, num_bytes: int, duration_s: float) -> None:
        """Learn from the measured duration of such a copy. An impossible duration is ignored."""
        low, high = _FACTOR_BOUNDS
        factor = self._transfer_factor * math.exp(_deviation(duration_s, self.transfer_s(num_bytes)))
        self._transfer_factor = min(max(factor, low), high)

    def _parts(self, iteration: Iteration) -> tuple[float, float, float, float, float]:
        """The iteration's five parts in seconds, with their factors."""
        profile, factors = self.profile, self._factors
        decodes, tokens = iteration.num_decodes, iteration.num_tokens
        return (
            factors[0] * profile.floor_s,
            factors[1] * (profile.decode(decodes) - profile.floor_s) if decodes else 0.0,
            factors[2] * profile.decode_context(iteration.num_context_tokens) if decodes else 0.0,
            factors[3] * profile.chunks_s(tokens, iteration.num_apart, decodes) if tokens else 0.0,
            factors[4] * profile.prefill_context_s * iteration.num_before,
        )


def _deviation(duration_s: float, predicted_s: float) -> float:
    """The part of a measured deviation to adopt, as a logarithm; 0 if there is nothing to learn."""
    if not (0.0 < duration_s < math.inf and predicted_s > 0.0):
        return 0.0
    low, high = _DURATION_BOUNDS_S
    deviation = math.log(min(max(duration_s, low), high) / predicted_s)
    if abs(deviation) < _LEAST_DEVIATION:
        return 0.0
    return _GAIN * min(max(deviation, -_MAX_DEVIATION), _MAX_DEVIATION)

"""How long iterations and copies take on this engine now: its profile, corrected by measurements while it runs.

The profile gives an iteration's time as a sum of parts: the floor of any iteration, what its rows take beyond the
floor, the tokens that its decodes attend to, and the tokens before its prefill chunks. What the rows take is the larger
of two parts: that of all its tokens, and that of its decodes. Each part has a factor, which begins at 1. A measurement
scales each factor by a power of measured over predicted duration. The power grows with the part's share of the
prediction (the multiplicative algebraic reconstruction technique: Gordon, Bender and Herman, 1970). So predictions soon
fit iterations like the last ones, however wrong the profile was; iterations of decodes alone or prefills alone tell the
parts apart; and times stay positive. It is deterministic and has seven numbers of state.

Whatever the factors are, the profile's rules hold (``Profile``): an iteration never takes less than its prefills alone,
nor than its decodes alone, and no time falls as tokens, requests or contexts grow.
"""

import math
from bisect import bisect_right
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

    __slots__ = ("_profile", "before_s", "between_s", "num_context_tokens", "num_decodes", "num_tokens")

    def __init__(
        self, profile: Profile, num_decodes: int, num_context_tokens: int, chunks: Sequence[tuple[int, int]] = ()
    ) -> None:
        """``num_context_tokens``: what the decodes attend to together. ``chunks``: each (tokens, tokens before it)."""
        self._profile = profile
        self.num_decodes = num_decodes
        self.num_context_tokens = num_context_tokens
        self.num_tokens = 0  # in prefill chunks
        self.before_s = 0.0  # what the tokens before the chunks cost, by the profile
        self.between_s = 0.0  # what attention between the chunks would cost, by the profile
        for num_tokens, num_before in chunks:
            self.add_chunk(num_tokens, num_before)

    def set_decodes(self, num_decodes: int, num_context_tokens: int) -> None:
        """Replace its decodes."""
        self.num_decodes, self.num_context_tokens = num_decodes, num_context_tokens

    def add_chunk(self, num_tokens: int, num_before: int) -> None:
        """Add a prefill chunk with ``num_before`` tokens before it."""
        self.between_s += self._profile.between_s(self.num_tokens, num_tokens)
        self.before_s += self._profile.before_s(num_tokens, num_before)
        self.num_tokens += num_tokens

    def with_chunk(self, num_tokens: int, num_before: int) -> "Iteration":
        """An iteration that has this chunk in addition."""
        other = Iteration(self._profile, self.num_decodes, self.num_context_tokens)
        other.num_tokens, other.before_s, other.between_s = self.num_tokens, self.before_s, self.between_s
        other.add_chunk(num_tokens, num_before)
        return other


class StepTimes:
    """One instance's times, shared by its scheduler, token budget, swap planner and policy."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._factors = [1.0] * 5
        self._swap_factor = 1.0
        self._transfer_factor = 1.0

    def copy(self) -> "StepTimes":
        """Times that have learned the same, and go on learning by themselves."""
        other = StepTimes(self.profile)
        other._factors = list(self._factors)
        other._swap_factor, other._transfer_factor = self._swap_factor, self._transfer_factor
        return other

    @property
    def min_iteration_s(self) -> float:
        """The shortest iteration: one decode without context. FastServe's first quantum."""
        return self.decode_s(1, 0)

    def prefill_s(self, num_tokens: int, num_before: int = 0) -> float:
        """Seconds of an iteration that only prefills ``num_tokens`` tokens of one request; 0 for none."""
        if num_tokens <= 0:
            return 0.0
        profile, factors = self.profile, self._factors
        return (
            factors[0] * profile.floor_s
            + factors[3] * (profile.prefill(num_tokens) - profile.floor_s)
            + factors[4] * profile.before_s(num_tokens, num_before)
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
        decodes = self._decode_parts(iteration)
        return self._with_chunks_s(decodes, iteration, iteration.num_tokens, iteration.between_s, iteration.before_s)

    def num_fitting_tokens(self, iteration: Iteration, num_before: int, limit_s: float, most: int) -> int:
        """How many more prefill tokens, up to ``most``, of a chunk with ``num_before`` tokens before it, can join the
        iteration so that it takes no longer than ``limit_s``.
        """
        profile, decodes = self.profile, self._decode_parts(iteration)
        tokens = iteration.num_tokens

        def with_more_s(num_tokens: int) -> float:
            between_s = iteration.between_s + profile.between_s(tokens, num_tokens)
            before_s = iteration.before_s + profile.before_s(num_tokens, num_before)
            return self._with_chunks_s(decodes, iteration, tokens + num_tokens, between_s, before_s)

        if with_more_s(most) <= limit_s:
            return most
        return bisect_right(range(1, most), limit_s, key=with_more_s)

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

    def _decode_parts(self, iteration: Iteration) -> tuple[float, float, float]:
        """Seconds, with their factors: the floor, what decodes take beyond it, and the decodes' context."""
        profile, factors = self.profile, self._factors
        floor_s = factors[0] * profile.floor_s
        if not (decodes := iteration.num_decodes):
            return floor_s, 0.0, 0.0
        decodes_s = factors[1] * (profile.decode(decodes) - profile.floor_s)
        return floor_s, decodes_s, factors[2] * profile.decode_context(iteration.num_context_tokens)

    def _rows_s(self, iteration: Iteration, num_tokens: int, between_s: float) -> float:
        """Seconds, with their factor, that all tokens take beyond the floor if so many are in prefill chunks."""
        profile = self.profile
        return self._factors[3] * (profile.rows_s(num_tokens, between_s, iteration.num_decodes) - profile.floor_s)

    def _with_chunks_s(
        self,
        decode_parts: tuple[float, float, float],
        iteration: Iteration,
        num_tokens: int,
        between_s: float,
        before_s: float,
    ) -> float:
        """Seconds of the iteration, if its prefill chunks were these."""
        floor_s, decodes_s, context_s = decode_parts
        if not num_tokens:
            return floor_s + decodes_s + context_s
        rows_s = max(decodes_s, self._rows_s(iteration, num_tokens, between_s))
        return floor_s + rows_s + context_s + self._factors[4] * before_s

    def _parts(self, iteration: Iteration) -> tuple[float, float, float, float, float]:
        """The iteration's five parts in seconds, with their factors. Of the decodes and of all tokens, only the part
        that takes longer counts.
        """
        floor_s, decodes_s, context_s = self._decode_parts(iteration)
        rows_s = self._rows_s(iteration, iteration.num_tokens, iteration.between_s) if iteration.num_tokens else 0.0
        if rows_s < decodes_s:
            rows_s = 0.0
        else:
            decodes_s = 0.0
        return floor_s, decodes_s, context_s, rows_s, self._factors[4] * iteration.before_s


def _deviation(duration_s: float, predicted_s: float) -> float:
    """The part of a measured deviation to adopt, as a logarithm; 0 if there is nothing to learn."""
    if not (0.0 < duration_s < math.inf and predicted_s > 0.0):
        return 0.0
    low, high = _DURATION_BOUNDS_S
    deviation = math.log(min(max(duration_s, low), high) / predicted_s)
    if abs(deviation) < _LEAST_DEVIATION:
        return 0.0
    return _GAIN * min(max(deviation, -_MAX_DEVIATION), _MAX_DEVIATION)

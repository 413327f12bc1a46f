"""A profile: how long an engine on its hardware takes to prefill, decode, swap and transfer KV.

The scheduler takes quanta and prefill times from it (FastServe, section 4.1: "the profiled execution time"), the swap
planner the cost of copies, and the simulator the duration of each iteration. Times are in seconds, sizes in bytes and
tokens. ``core.timing.step_times`` corrects the profile by measurements while the engine runs.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from actorserve.core.messages import Speed


@dataclass(frozen=True, slots=True)
class Curve:
    """A piecewise linear function through measured points.

    It is constant before the first point, and continues its last piece beyond the last point. ``xs`` grow strictly.
    ``ys`` are not negative and never fall, because more work does not take less time. One point makes a constant.

    Raises: ValueError for other points.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    _slopes: tuple[float, ...] = field(init=False, repr=False, compare=False)  # after each point

    def __post_init__(self) -> None:
        xs, ys = self.xs, self.ys
        if not xs or len(xs) != len(ys):
            raise ValueError("a curve needs points, each with an x and a y")
        if any(not left < right for left, right in pairwise(xs)):
            raise ValueError("a curve's x values must grow")
        if any(not 0.0 <= y < math.inf for y in ys):
            raise ValueError("a curve's y values must be finite and not negative")
        if any(right < left for left, right in pairwise(ys)):
            raise ValueError("a curve's y values must not fall")
        slopes = [(ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i]) for i in range(len(xs) - 1)]
        object.__setattr__(self, "_slopes", (*slopes, slopes[-1] if slopes else 0.0))

    def __call__(self, x: float) -> float:
        i = bisect_right(self.xs, x) - 1
        return self.ys[0] if i < 0 else self.ys[i] + self._slopes[i] * (x - self.xs[i])

    def reach(self, start: float, budget: float, scale: float = 1.0, extra: float = 0.0) -> float:
        """How far beyond ``start`` a ``budget`` reaches; may be infinite.

        The curve's rise costs ``scale`` times itself, and each unit of x costs ``extra`` in addition. ``extra`` may be
        negative, but no piece costs less than 0.
        """
        xs = self.xs
        i = bisect_right(xs, start)
        x = start
        while True:
            cost = max(0.0, (scale * self._slopes[i - 1] if i else 0.0) + extra)
            if i == len(xs):
                return x - start + budget / cost if cost else math.inf
            piece = cost * (xs[i] - x)
            if cost and piece >= budget:
                return x - start + budget / cost
            budget -= piece
            x = xs[i]
            i += 1


def not_falling(ys: Sequence[float]) -> list[float]:
    """The non-falling values nearest to measured ones, by least squares (the pool-adjacent-violators algorithm)."""
    pools: list[tuple[float, int]] = []  # mean, number of values
    for y in ys:
        mean, count = y, 1
        while pools and pools[-1][0] > mean:
            before, number = pools.pop()
            mean = (before * number + mean * count) / (number + count)
            count += number
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Link:
    """A connection that copies bytes: to host memory and back, or to another instance."""

    latency_s: float
    bytes_per_s: float

    def copy_s(self, num_bytes: float) -> float:
        """Seconds that one copy of ``num_bytes`` takes."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """How long each kind of work takes.

    - ``prefill``: tokens -> seconds of an iteration that prefills them, with no tokens before them.
    - ``prefill_context_s``: additional seconds for each pair of one of its tokens and one token before its chunk.
    - ``decode``: requests -> seconds of an iteration that decodes them, without context.
    - ``decode_context``: tokens of context of all decodes together -> additional seconds.

    ``threads`` is 0 on a GPU. ``source`` says where a published profile comes from and what was derived from it.
    ``errors`` are the relative errors of fits, by name.
    """

    name: str
    model: str
    hardware: str
    prefill: Curve
    prefill_context_s: float
    decode: Curve
    decode_context: Curve
    swap: Link
    transfer: Link
    kv_bytes_per_token: int
    dtype: str = ""
    threads: int = 0
    source: str = ""
    errors: tuple[tuple[str, float], ...] = ()
    floor_s: float = field(init=False, repr=False, compare=False)
    """Seconds that every iteration takes at least, to read the weights."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "floor_s", min(self.prefill(1), self.decode(1)))

    @property
    def min_iteration_s(self) -> float:
        """The shortest iteration: one decode without context. FastServe's first quantum."""
        return self.decode(1) + self.decode_context(0)

    def prefill_s(self, num_tokens: int, num_context_tokens: int = 0) -> float:
        """Seconds of an iteration that only prefills ``num_tokens`` tokens of one request; 0 for none."""
        if num_tokens <= 0:
            return 0.0
        return self.prefill(num_tokens) + self.prefill_context_s * num_tokens * num_context_tokens

    def decode_s(self, num_requests: int, num_context_tokens: int) -> float:
        """Seconds of an iteration that decodes these requests, which attend to that many tokens in all; 0 for none."""
        return self.decode(num_requests) + self.decode_context(num_context_tokens) if num_requests else 0.0

    def chunks_s(self, num_tokens: int, num_apart: int, num_decodes: int) -> float:
        """Seconds that prefill chunks of ``num_tokens`` in all add to an iteration, without their context.

        ``num_apart``: pairs of a chunk token with a token of another request, decodes included. They are subtracted,
        because such tokens do not attend to each other. In published measurements (``config/profiles``) b prompts of n
        tokens take nearly as long as one of b x n tokens: the sum decides, not each chunk's own time. Tokens of decodes
        count as well, because they fill an iteration up to the point at which computing bounds it, just like prompts.
        """
        least_s = self.prefill(num_decodes) if num_decodes else self.floor_s
        return max(0.0, self.prefill(num_decodes + num_tokens) - self.prefill_context_s * num_apart - least_s)

    def step_s(self, chunks: Sequence[tuple[int, int]], num_decodes: int, num_context_tokens: int) -> float:
        """Seconds of an iteration of prefill chunks, each (tokens, tokens before it), and of decodes that share it.

        ``floor_s`` is counted once, because the weights are read once for all of them.
        """
        num_tokens = num_before = num_apart = 0
        for tokens, context in chunks:
            num_apart += tokens * (num_decodes + num_tokens)
            num_before += tokens * context
            num_tokens += tokens
        if not num_tokens:
            return self.decode_s(num_decodes, num_context_tokens)
        chunks_s = self.chunks_s(num_tokens, num_apart, num_decodes) + self.prefill_context_s * num_before
        return chunks_s + (self.decode_s(num_decodes, num_context_tokens) if num_decodes else self.floor_s)

    def speed(self) -> Speed:
        """The part of the profile that the coordinator gets."""
        return Speed(tuple(round(x) for x in self.prefill.xs), self.prefill.ys, self.min_iteration_s)

"""A profile: what an engine on its hardware takes for prefill, decode, swapping and transfer.

The scheduler reads quanta and prefill times from it (FastServe, section 4.1: "the profiled execution time"), the swap
planner what copies cost, the simulator the duration of every iteration. Times are seconds, sizes bytes and tokens.
``core.timing.step_times`` corrects it by what is measured while the engine runs.
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

    Before the first point it is constant, beyond the last it goes on along its last piece. ``xs`` grow strictly; ``ys``
    are not negative and never fall, since more work does not take less time. One point makes a constant.
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
        """How far beyond ``start`` a ``budget`` goes, where the curve's rise costs ``scale`` times itself, and each
        unit ``extra`` besides (which may be negative; no piece costs less than nothing). Infinite where it never ends.
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
    """Measured values evened out where they fall: the nearest that do not, by least squares (pooled neighbours)."""
    pools: list[tuple[float, int]] = []  # mean, how many
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
    """A way that bytes go: to host memory and back, or to another instance."""

    latency_s: float
    bytes_per_s: float

    def copy_s(self, num_bytes: float) -> float:
        """What one copy of so many bytes takes."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """What each kind of work takes.

    ``prefill``: tokens -> s of an iteration that prefills so many, none before them. ``prefill_context_s``: what each
    of its tokens takes more for each token before its chunk. ``decode``: requests -> s of an iteration that decodes so
    many, without context. ``decode_context``: tokens of context of all of them together -> what that takes more.

    ``threads`` is 0 on a GPU. ``source`` says where a published profile comes from and what was derived, and ``errors``
    how far a fit is off, by name (relative).
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
    """What every iteration takes at least: reading the weights."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "floor_s", min(self.prefill(1), self.decode(1)))

    @property
    def min_iteration_s(self) -> float:
        """The shortest iteration: one decode without context. FastServe's first quantum."""
        return self.decode(1) + self.decode_context(0)

    def prefill_s(self, num_tokens: int, num_context_tokens: int = 0) -> float:
        """An iteration that prefills so many tokens of one request, and nothing else; 0 for none."""
        if num_tokens <= 0:
            return 0.0
        return self.prefill(num_tokens) + self.prefill_context_s * num_tokens * num_context_tokens

    def decode_s(self, num_requests: int, num_context_tokens: int) -> float:
        """An iteration that decodes so many requests, which attend to so many tokens in all; 0 for none."""
        return self.decode(num_requests) + self.decode_context(num_context_tokens) if num_requests else 0.0

    def chunks_s(self, num_tokens: int, num_apart: int, num_decodes: int) -> float:
        """What prefill chunks of so many tokens together add to an iteration, without what lies before them.

        ``num_apart``: pairs of tokens of different requests, which do not attend to each other as a prompt's own do,
        each chunk token with each decode's included. In published measurements (``config/profiles``) b prompts of n
        tokens take nearly what one of b x n tokens takes: the sum decides, not each chunk's own time. And so do tokens
        of decodes: they fill an iteration up to where it begins to be bound by computing, just as those of prompts do.
        """
        least_s = self.prefill(num_decodes) if num_decodes else self.floor_s
        return max(0.0, self.prefill(num_decodes + num_tokens) - self.prefill_context_s * num_apart - least_s)

    def step_s(self, chunks: Sequence[tuple[int, int]], num_decodes: int, num_context_tokens: int) -> float:
        """An iteration of prefill chunks, each (tokens, tokens before it), and of decodes that share it.

        The weights are read once for all of them, so ``floor_s`` is counted once.
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
        """What the coordinator is told."""
        return Speed(tuple(round(x) for x in self.prefill.xs), self.prefill.ys, self.min_iteration_s)

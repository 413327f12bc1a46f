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

    def pieces(self) -> list[tuple[float, float, float]]:
        """The pieces between its points: each one's first x, last x, and slope."""
        return [(left, right, slope) for (left, right), slope in zip(pairwise(self.xs), self._slopes, strict=False)]


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
class CapSweep:
    """What power caps cost, measured: columns by rising cap, up to the device's default power limit. An iteration of a
    prompt takes ``prompt_s`` at ``prompt_watts`` under each cap, and one of decodes ``token_s`` at ``token_watts``.
    ``source`` names the device.

    Raises: ValueError for columns of different lengths.
    """

    caps_watts: tuple[float, ...]
    prompt_s: tuple[float, ...]
    token_s: tuple[float, ...]
    prompt_watts: tuple[float, ...]
    token_watts: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        columns = (self.caps_watts, self.prompt_s, self.token_s, self.prompt_watts, self.token_watts)
        if len({len(column) for column in columns}) > 1:
            raise ValueError("the columns of power caps must have equal lengths")


@dataclass(frozen=True, slots=True)
class Profile:
    """How long each kind of work takes.

    - ``prefill``: tokens -> seconds of an iteration that prefills them as one prompt, with no tokens before them.
    - ``prefill_context_s``: additional seconds for each pair of one of its tokens and one token before its chunk.
    - ``weights_s``: seconds to read the weights once. Each chunk of a prompt after the first one costs at least so much
      in addition to the whole prompt.
    - ``decode``: requests -> seconds of an iteration that decodes them, without context.
    - ``decode_context``: tokens of context of all decodes together -> additional seconds.
    - ``decode_mixed_s``: additional seconds for each decode whose iteration also prefills, because a decode has work
      that a prefill's token has not: it samples a token.
    - ``pause_s``, ``pause_row_s``: seconds between the end of an iteration and the beginning of the next one, and
      additional seconds for each request in it. An iteration that was planned ahead does not wait for so long.

    ``num_layers`` is the model's; 1 if it is not known. ``threads`` is 0 on a GPU.
    ``source`` says where a published profile comes from and what was derived from it.
    ``caps`` says what power caps cost, if that was measured.
    ``errors`` are the relative errors of fits, by name, and ``drift``: by how much the machine's speed changed while it
    was measured.

    Times for an iteration follow these rules, whatever the numbers are:

    - It never takes less than its prefills alone, nor than its decodes alone. It takes as long as a prompt of all its
      tokens, those of decodes included, and in addition the time for the contexts.
    - A prompt in chunks never takes less than the prompt whole.
    - Prompts that share an iteration do not attend to each other.
    - No time falls as tokens, requests or contexts grow.

    Raises: ValueError if ``weights_s`` is more than the shortest iteration, because every iteration reads the weights.
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
    num_layers: int = 1
    weights_s: float = 0.0
    decode_mixed_s: float = 0.0
    pause_s: float = 0.0
    pause_row_s: float = 0.0
    dtype: str = ""
    threads: int = 0
    source: str = ""
    errors: tuple[tuple[str, float], ...] = ()
    caps: CapSweep | None = None
    floor_s: float = field(init=False, repr=False, compare=False)
    """Seconds that every iteration takes at least."""
    _attention: Curve = field(init=False, repr=False, compare=False)
    _growth: Curve = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        floor_s = min(self.prefill.ys[0], self.decode.ys[0])
        if self.weights_s > floor_s:
            raise ValueError(f"weights_s is {self.weights_s:g}: expected at most {floor_s:g}, the shortest iteration")
        object.__setattr__(self, "floor_s", floor_s)
        object.__setattr__(self, "_attention", _attention(self.prefill, self.prefill_context_s))
        object.__setattr__(self, "_growth", _growth(self.prefill, self.weights_s))

    @property
    def min_iteration_s(self) -> float:
        """The shortest iteration: one decode without context. FastServe's first quantum."""
        return self.decode(1) + self.decode_context(0)

    def prefill_s(self, num_tokens: int, num_before: int = 0) -> float:
        """Seconds of an iteration that only prefills ``num_tokens`` tokens of one request; 0 for none."""
        if num_tokens <= 0:
            return 0.0
        return self.prefill(num_tokens) + self.before_s(num_tokens, num_before)

    def decode_s(self, num_requests: int, num_context_tokens: int) -> float:
        """Seconds of an iteration that decodes these requests, which attend to that many tokens in all; 0 for none."""
        return self.decode(num_requests) + self.decode_context(num_context_tokens) if num_requests else 0.0

    def before_s(self, num_tokens: int, num_before: int) -> float:
        """Seconds that a chunk takes longer because its prompt has ``num_before`` tokens before it.

        It is the largest of three. Its tokens attend to the earlier ones. It reads their KV, as a decode does. And the
        prompt's chunks together take at least as long as the whole prompt in one iteration, and ``weights_s`` longer
        for each further chunk.
        """
        if not num_tokens or not num_before:
            return 0.0
        growth, context = self._growth, self.decode_context
        return max(
            self.prefill_context_s * num_tokens * num_before,
            context(num_before) - context.ys[0],
            growth(num_before + num_tokens) - growth(num_before) - growth(num_tokens),
        )

    def rows_s(self, num_tokens: int, between_s: float, num_decodes: int) -> float:
        """Seconds for all tokens of prefill chunks and decodes together, without the contexts of both.

        ``between_s``: the seconds in which the chunks would attend to each other if they were one prompt. In published
        measurements (``config/profiles``) b prompts of n tokens take nearly as long as one of b x n tokens: the sum
        decides, not each chunk's own time. Tokens of decodes count as well, because they fill an iteration up to the
        point at which computing bounds it, just like prompts.
        """
        return self.prefill(num_decodes + num_tokens) + self.decode_mixed_s * num_decodes - between_s

    def between_s(self, num_tokens: int, num_more: int) -> float:
        """Seconds in which two parts of a prompt of so many tokens attend to each other."""
        if not num_tokens:
            return 0.0
        attention = self._attention
        return attention(num_tokens + num_more) - attention(num_tokens) - attention(num_more)

    def step_s(self, chunks: Sequence[tuple[int, int]], num_decodes: int, num_context_tokens: int) -> float:
        """Seconds of an iteration of prefill chunks, each (tokens, tokens before it), and of decodes that share it."""
        num_tokens = 0
        between_s = before_s = 0.0
        for tokens, before in chunks:
            between_s += self.between_s(num_tokens, tokens)
            num_tokens += tokens
            before_s += self.before_s(tokens, before)
        if not num_tokens:
            return self.decode_s(num_decodes, num_context_tokens)
        rows_s = self.rows_s(num_tokens, between_s, num_decodes)
        if num_decodes:
            rows_s = max(rows_s, self.decode(num_decodes)) + self.decode_context(num_context_tokens)
        return rows_s + before_s

    def idle_s(self, num_requests: int) -> float:
        """Seconds between two iterations, if the second one, of that many requests, was not planned ahead."""
        return self.pause_s + self.pause_row_s * num_requests

    def speed(self) -> Speed:
        """The part of the profile that the coordinator gets."""
        return Speed(tuple(round(x) for x in self.prefill.xs), self.prefill.ys, self.min_iteration_s)


def _attention(prefill: Curve, context_s: float) -> Curve:
    """The time in which n tokens of a prompt attend to each other: ``context_s`` for each of n * n / 2 pairs.

    Between measured lengths it is linear. It is convex, and grows no faster than ``prefill``, so that the time for
    prompts without the attention between them never falls.
    """
    least = math.inf
    slopes = []
    for left, right, slope in reversed(prefill.pieces()):
        least = min(least, slope, context_s * (left + right) / 2.0)
        slopes.append(least)
    return _from_slopes(prefill.xs, slopes[::-1])


def _growth(prefill: Curve, weights_s: float) -> Curve:
    """The part of ``prefill`` that grows faster than in proportion to the tokens.

    Without it and ``weights_s``, a token's share of the time never grows with the tokens. So a prompt of the remaining
    times never takes longer than its parts. It is convex, so that a chunk's time never falls as its context grows.
    """
    steepest = 0.0
    slopes = []
    rest_s = prefill.ys[0] - weights_s
    for left, right, slope in prefill.pieces():
        if left > 0.0:
            steepest = max(steepest, slope - rest_s / left)
        slopes.append(steepest)
        rest_s += (slope - steepest) * (right - left)
    return _from_slopes(prefill.xs, slopes)


def _from_slopes(xs: Sequence[float], slopes: Sequence[float]) -> Curve:
    """The curve that is 0 up to the first x, and has these slopes between the points."""
    ys = [0.0]
    for (left, right), slope in zip(pairwise(xs), slopes, strict=True):
        ys.append(ys[-1] + slope * (right - left))
    return Curve(tuple(xs), tuple(ys))

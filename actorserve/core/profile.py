"""A profile: what an engine on its hardware takes for prefill, decode, swapping and transfer.

The scheduler reads quanta and prefill times from it (FastServe, section 4.1: "the profiled execution time"), the swap
planner what copies cost, the simulator the duration of every iteration. Times are seconds, sizes bytes and tokens.
``core.step_times`` corrects it by what is measured while the engine runs.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Curve:
    """A piecewise linear function through measured points.

    Before the first point it is constant, beyond the last it goes on along its last piece. ``xs`` grow strictly; ``ys``
    are not negative. One point makes a constant.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.xs or len(self.xs) != len(self.ys):
            raise ValueError("a curve needs points, each with an x and a y")
        if any(right <= left for left, right in zip(self.xs, self.xs[1:], strict=False)):
            raise ValueError("a curve's x values must grow")
        if any(not 0.0 <= y < float("inf") for y in self.ys):
            raise ValueError("a curve's y values must be finite and not negative")

    def __call__(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if x <= xs[0] or len(xs) == 1:
            return ys[0]
        i = min(bisect_right(xs, x), len(xs) - 1)
        slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        return ys[i - 1] + slope * (x - xs[i - 1])


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
    """``prefill``: tokens -> s of an iteration that prefills so many, none before them. ``prefill_context_s``: what each
    of its tokens takes more for each token before its chunk. ``decode``: requests -> s of an iteration that decodes so
    many, without context. ``decode_context``: tokens of context of all of them together -> what that takes more.
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

    def step_s(self, chunks: Sequence[tuple[int, int]], num_decodes: int, num_context_tokens: int) -> float:
        """An iteration of prefill chunks, each (tokens, tokens before it), and of decodes that share it.

        The weights are read once for all of them, so what an iteration takes at least is counted once.
        """
        num_tokens = sum(tokens for tokens, _ in chunks)
        if not num_tokens:
            return self.decode_s(num_decodes, num_context_tokens)
        context_s = self.prefill_context_s * sum(tokens * context for tokens, context in chunks)
        # Prefills of several requests attend each to its own tokens alone: their curves' parts above the least, added.
        least_s = self.prefill(1)
        prefill_s = least_s + sum(self.prefill(tokens) - least_s for tokens, _ in chunks) + context_s
        if not num_decodes:
            return prefill_s
        return prefill_s + max(0.0, self.decode_s(num_decodes, num_context_tokens) - min(self.decode(1), least_s))

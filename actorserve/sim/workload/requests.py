"""The requests of a measurement: arrival times, prompt lengths and output lengths. Seeded."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle

from actorserve.errors import WorkloadError
from actorserve.sim.workload.lengths import Lengths
from actorserve.sim.workload.traces import TraceRow


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. ``at_s`` counts from the beginning; a closed loop ignores it.

    The first ``prefix_tokens`` of its prompt are the same for all requests of one ``prefix``.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    prefix: int = 0
    prefix_tokens: int = 0


LengthPairs = Callable[[random.Random], tuple[int, int]]
"""Draws the lengths of one request's prompt and output."""


_NUM_DRAWN = 10_000  # lengths that are drawn to find their means


def poisson_times(rate_per_s: float, rng: random.Random) -> Iterator[float]:
    """Arrival times of a Poisson process: gaps are independent, exponential, with mean ``1 / rate_per_s``."""
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate_per_s)
        yield at_s


def gamma_times(rate_per_s: float, cv: float, rng: random.Random) -> Iterator[float]:
    """Arrival times whose gaps are Gamma distributed: mean ``1 / rate_per_s``, standard deviation ``cv`` times that.

    A ``cv`` of 1 is a Poisson process; above it arrivals come in bursts.
    """
    shape, at_s = 1.0 / (cv * cv), 0.0
    while True:
        at_s += rng.gammavariate(shape, 1.0 / (rate_per_s * shape))
        yield at_s


def regular_times(rate_per_s: float) -> Iterator[float]:
    """Arrival times with equal gaps."""
    return (number / rate_per_s for number in count(1))


def warped(times: Iterator[float], factors: Iterator[tuple[float, float]]) -> Iterator[float]:
    """Arrival times at a changing rate: the rate of ``times`` multiplied by ``factors``, each (until_s, factor).

    The process's own time runs faster or slower, so that the shape of its bursts stays. Factors are above 0, and the
    last factor holds for ever.
    """
    own_s = since_s = 0.0  # in the process's own time, and in the run's time
    until_s, factor = next(factors)
    for at_s in times:
        while own_s + factor * (until_s - since_s) < at_s:
            own_s += factor * (until_s - since_s)
            since_s = until_s
            until_s, factor = next(factors)
        yield since_s + (at_s - own_s) / factor


def cycle_factors(factors: Sequence[float], each_s: float) -> Iterator[tuple[float, float]]:
    """The factors in turn, again and again, each for the same time."""
    return ((number * each_s, factor) for number, factor in enumerate(cycle(factors), 1))


def spike_factors(at_s: float, duration_s: float, factor: float) -> Iterator[tuple[float, float]]:
    """One factor, for one period of time."""
    return iter([(at_s, 1.0), (at_s + duration_s, factor), (math.inf, 1.0)])


def independent(prompts: Lengths, outputs: Lengths) -> LengthPairs:
    """Prompt and output lengths, drawn independently."""
    return lambda rng: (prompts.draw(rng), outputs.draw(rng))


def in_order(rows: Sequence[TraceRow]) -> LengthPairs:
    """A trace's rows one after another; raises StopIteration after the last."""
    left = iter(rows)

    def draw(_: random.Random) -> tuple[int, int]:
        row = next(left)
        return row.prompt_tokens, row.output_tokens

    return draw


def sampled(rows: Sequence[TraceRow]) -> LengthPairs:
    """Rows of a trace at random, each prompt with its output."""

    def draw(rng: random.Random) -> tuple[int, int]:
        row = rng.choice(rows)
        return row.prompt_tokens, row.output_tokens

    return draw


def sampled_apart(rows: Sequence[TraceRow]) -> LengthPairs:
    """The prompt of a random row with the output of another one, as SplitwiseSim draws them: a long prompt says nothing
    about its output.
    """
    return lambda rng: (rng.choice(rows).prompt_tokens, rng.choice(rows).output_tokens)


def with_ratio(pairs: LengthPairs, ratio: float) -> LengthPairs:
    """Scaled so that the mean prompt is ``ratio`` times the mean output, and the mean sum stays the same.

    Prompts and outputs are each scaled by a factor, as FastServe's Figure 14 alters the ratio "while preserving the
    original length distribution": a long prompt still says nothing about its output. Each has at least one token.
    """
    rng = random.Random("means")
    drawn = [pairs(rng) for _ in range(_NUM_DRAWN)]
    mean_prompt = sum(prompt for prompt, _ in drawn) / _NUM_DRAWN
    mean_output = sum(output for _, output in drawn) / _NUM_DRAWN
    mean_total = mean_prompt + mean_output
    prompt_factor = mean_total * ratio / (1.0 + ratio) / mean_prompt
    output_factor = mean_total / (1.0 + ratio) / mean_output

    def draw(rng: random.Random) -> tuple[int, int]:
        prompt, output = pairs(rng)
        return max(1, round(prompt * prompt_factor)), max(1, round(output * output_factor))

    return draw


def cut(prompt_tokens: int, output_tokens: int, max_tokens: int) -> tuple[int, int]:
    """Lengths that fit a context of ``max_tokens``: one that is too long first loses prompt, down to one token."""
    output_tokens = min(output_tokens, max_tokens - 1)
    return min(prompt_tokens, max_tokens - output_tokens), output_tokens


def synthetic(pairs: LengthPairs, count: int, rate_per_s: float | None, seed: int) -> list[Arrival]:
    """Requests with drawn lengths; Poisson arrivals, or all at once for a closed loop (``rate_per_s`` None)."""
    times, lengths = random.Random(f"{seed} times"), random.Random(f"{seed} lengths")
    if rate_per_s is None:
        return [Arrival(0.0, *pairs(lengths)) for _ in range(count)]
    arriving = poisson_times(rate_per_s, times)
    return [Arrival(next(arriving), *pairs(lengths)) for _ in range(count)]


def replayed(
    rows: Sequence[TraceRow],
    rate_per_s: float | None,
    closed_loop: bool,
    time_scale: float,
    max_tokens: int | None,
    seed: int,
) -> list[Arrival]:
    """A trace's requests at its own times (``time_scale`` 0.5: twice as fast), or with its lengths alone.

    ``max_tokens`` bounds prompt + output: longer requests are cut, the prompt first.

    Raises: WorkloadError if times are needed and the trace has none.
    """
    if closed_loop:
        times = [0.0] * len(rows)
    elif rate_per_s is not None:
        arriving = poisson_times(rate_per_s, random.Random(f"{seed} times"))
        times = [next(arriving) for _ in rows]
    else:
        times = trace_times(rows, time_scale)
    arrivals = []
    for at_s, row in zip(times, rows, strict=True):
        lengths = row.prompt_tokens, row.output_tokens
        arrivals.append(Arrival(at_s, *(lengths if max_tokens is None else cut(*lengths, max_tokens))))
    return arrivals


def trace_times(rows: Sequence[TraceRow], time_scale: float = 1.0) -> list[float]:
    """When the trace's requests arrived. Raises: WorkloadError if it has no times."""
    times = [row.at_s * time_scale for row in rows if row.at_s is not None]
    if len(times) < len(rows):
        raise WorkloadError("the trace has no times; give a rate")
    return times


class Prompts:
    """Token ids of prompts of a given length. Prompts of one prefix share its tokens; all other tokens differ.

    A simulated engine only compares ids. If nothing is compared (no prefix cache), all tokens are the same, and prompts
    of one length are one tuple. It is kept until their requests have ended, because the prompts of all lengths together
    would take hundreds of MiB.
    """

    def __init__(self, compared: bool) -> None:
        self._compared = compared
        self._in_use: dict[int, tuple[int, ...]] = {}  # by length
        self._num_users: dict[int, int] = {}  # by length

    def token_ids(self, arrival: Arrival, number: int) -> tuple[int, ...]:
        """The prompt of the request with this number; no two requests have the same number."""
        length = arrival.prompt_tokens
        if not self._compared:
            prompt = self._in_use.get(length)
            if prompt is None:
                prompt = self._in_use[length] = (0,) * length
            self._num_users[length] = self._num_users.get(length, 0) + 1
            return prompt
        num_shared = min(arrival.prefix_tokens, length)
        return (2 * arrival.prefix,) * num_shared + (2 * number + 1,) * (length - num_shared)

    def on_end(self, length: int) -> None:
        """A request with a prompt of this length has ended."""
        if self._compared:
            return
        self._num_users[length] -= 1
        if not self._num_users[length]:
            del self._num_users[length], self._in_use[length]

"""Measures an engine's times, and fits a profile to them."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from actorserve.core.timing.profile import Curve, Link, Profile, not_falling
from workers.engine import Engine
from workers.profile.engine_timer import EngineTimer, Shape, loopback_link, memory_link

_NUM_FITS = 30

Progress = Callable[[float, str], None]
"""Called with the share of the work that is done, and a description of the current work."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How many rounds over all shapes to measure after a warm-up: as many as fit into ``budget_s``, within bounds.

    Once a shape took longer than ``slow_s``, shapes that are at least as large in every respect are left out.
    """

    least_rounds: int
    most_rounds: int
    budget_s: float
    slow_s: float


QUICK = Effort(least_rounds=2, most_rounds=7, budget_s=3.0, slow_s=1.5)
THOROUGH = Effort(least_rounds=5, most_rounds=25, budget_s=60.0, slow_s=20.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """The iterations that a profile is fitted to, and those that it is then compared with."""

    fitted: tuple[Shape, ...]
    compared: tuple[Shape, ...] = ()


def quick_plan(engine: Engine, max_batch_tokens: int, max_batch_requests: int) -> Plan:
    """Few shapes, for a first start."""
    most = min(max_batch_tokens, engine.model.max_tokens)
    half = min(512, engine.model.max_tokens // 2)
    prompts = _prefills(_distinct(1, most // 16, most // 4, most // 2, most), (0,))
    chunks = _prefills(_distinct(most // 4, most=half), _whole_blocks(engine, half))
    batches = _distinct(1, 4, 16, max_batch_requests, most=max_batch_requests)
    return Plan((*prompts, *chunks, *_decodes(batches, _whole_blocks(engine, half // 16, half))))


def thorough_plan(engine: Engine, max_batch_tokens: int, max_batch_requests: int) -> Plan:
    """Many shapes, and some to compare with."""
    most = min(max_batch_tokens, engine.model.max_tokens)
    long = min(2048, engine.model.max_tokens // 2)
    doubling = [2**n for n in range(math.ceil(math.log2(max(2, most))))]
    prompts = _prefills(_distinct(*doubling, *(3 * n // 2 for n in doubling[6:]), most, most=most), (0,))
    chunks = _prefills(_distinct(most // 16, most // 4, most=long), _whole_blocks(engine, long // 4, long))
    batches = _distinct(*(2**n for n in range(10)), max_batch_requests, most=max_batch_requests)
    decodes = _decodes(batches, _whole_blocks(engine, long // 32, long // 4, long))
    compared = [
        Shape(chunk.num_tokens, chunk.num_before, num_requests, long // 4)
        for chunk in _prefills(_distinct(16, most // 16, most // 4, most=long), _whole_blocks(engine, 0, long // 2))
        for num_requests in (min(8, max_batch_requests),)
    ]
    return Plan((*prompts, *chunks, *decodes), tuple(compared))


def _prefills(lengths: Sequence[int], contexts: Sequence[int]) -> list[Shape]:
    return [Shape(num_tokens, context, 0, 0) for context, num_tokens in itertools.product(contexts, lengths)]


def _decodes(batches: Sequence[int], contexts: Sequence[int]) -> list[Shape]:
    return [Shape(0, 0, batch, context) for context, batch in itertools.product(contexts, batches)]


def _distinct(*numbers: int, most: int | None = None) -> tuple[int, ...]:
    return tuple(sorted({max(1, number if most is None else min(number, most)) for number in numbers}))


def _whole_blocks(engine: Engine, *numbers: int) -> tuple[int, ...]:
    return tuple(sorted({number // engine.tokens_per_block * engine.tokens_per_block for number in numbers}))


@dataclass(frozen=True, slots=True)
class Measurements:
    """Seconds of each shape (the median), and the links."""

    fitted_s: dict[Shape, float]
    compared_s: dict[Shape, float]
    swap: Link
    transfer: Link


@dataclass(frozen=True, slots=True)
class Facts:
    """What a profile depends on in addition to the model. ``threads`` is 0 on a GPU."""

    dtype: str
    hardware: str
    threads: int


def measure(engine: Engine, plan: Plan, effort: Effort, progress: Progress) -> Measurements:
    """Run the shapes on an engine that serves no requests. This overwrites its KV pool.

    Each round runs all shapes, so that a temporary disturbance of the machine affects all of them alike.
    """
    shapes = list(dict.fromkeys((*plan.fitted, *plan.compared)))
    with EngineTimer(engine, shapes) as timer:
        slow: list[Shape] = []
        times: dict[Shape, list[float]] = {}
        for number, shape in enumerate(shapes):
            progress(number / len(shapes) / (effort.least_rounds + 1), "warming up")
            if any(all(size >= least for size, least in zip(shape, slow_shape, strict=True)) for slow_shape in slow):
                continue
            times[shape] = []
            if timer.iteration_s(shape) > effort.slow_s:
                slow.append(shape)
        began = time.perf_counter()
        num_rounds, done = effort.least_rounds, 0
        while done < num_rounds:
            for number, (shape, durations) in enumerate(times.items()):
                progress((1 + done + number / len(times)) / (1 + num_rounds), _words(shape))
                durations.append(timer.iteration_s(shape))
            done += 1
            round_s = max((time.perf_counter() - began) / done, 1e-9)
            num_rounds = int(min(max(effort.budget_s / round_s, effort.least_rounds), effort.most_rounds))
        progress(1.0, "copies")
        swap = timer.swap_link() if engine.num_host_blocks else memory_link()
        transfer = loopback_link()
    medians = {shape: statistics.median(durations) for shape, durations in times.items()}
    return Measurements(
        {shape: medians[shape] for shape in plan.fitted if shape in medians},
        {shape: medians[shape] for shape in plan.compared if shape in medians},
        swap,
        transfer,
    )


def make_profile(name: str, model: str, facts: Facts, kv_bytes_per_token: int, found: Measurements) -> Profile:
    """The profile that fits the measurements; its errors are those of the shapes that it is compared with."""
    prefills = {shape: seconds for shape, seconds in found.fitted_s.items() if shape.num_tokens}
    prefill = _curve(sorted((shape.num_tokens, t) for shape, t in prefills.items() if not shape.num_before))
    context_s = _slope([(s.num_tokens * s.num_before, t - prefill(s.num_tokens)) for s, t in prefills.items()])

    decode, decode_context = _decode_curves(
        [
            (shape.num_requests, shape.num_all_context_tokens, seconds)
            for shape, seconds in found.fitted_s.items()
            if shape.num_requests
        ]
    )
    profile = Profile(
        name=name,
        model=model,
        hardware=facts.hardware,
        dtype=facts.dtype,
        threads=facts.threads,
        prefill=prefill,
        prefill_context_s=_rounded(context_s),
        decode=decode,
        decode_context=decode_context,
        swap=_rounded_link(found.swap),
        transfer=_rounded_link(found.transfer),
        kv_bytes_per_token=kv_bytes_per_token,
    )
    errors = [abs(profile_s(profile, shape) / seconds - 1.0) for shape, seconds in found.compared_s.items()]
    if not errors:
        return profile
    stated = (("mixed_max", round(max(errors), 4)), ("mixed_median", round(statistics.median(errors), 4)))
    return replace(profile, errors=stated)


def profile_s(profile: Profile, shape: Shape) -> float:
    """The seconds that a profile predicts for a shape."""
    return profile.step_s([(shape.num_tokens, shape.num_before)], shape.num_requests, shape.num_all_context_tokens)


def _curve(points: Sequence[tuple[int, float]]) -> Curve:
    xs = [float(x) for x, _ in points]
    ys = not_falling([max(seconds, 1e-9) for _, seconds in points])
    if len(xs) == 1:  # all other shapes were too slow, or too large for the engine
        xs, ys = [xs[0], 2 * xs[0]], [ys[0], 2 * ys[0]]
    return Curve(tuple(xs), tuple(_rounded(y) for y in ys))


def _decode_curves(points: Sequence[tuple[int, int, float]]) -> tuple[Curve, Curve]:
    """Curves by requests and by tokens of context in all, whose sum fits points (requests, tokens, seconds).

    Each curve in turn is fitted to the remainder of the other, again and again. The cost of a token of context depends
    on their number, so it is a curve as well, with a knot for each factor of four. The fit minimises relative errors,
    because milliseconds that do not matter at 128,000 tokens matter at 500.
    """
    by_batch: dict[int, list[tuple[int, float]]] = {}
    by_knot: dict[int, list[tuple[int, int, float]]] = {}
    for batch, num_tokens, seconds in points:
        by_batch.setdefault(batch, []).append((num_tokens, seconds))
        by_knot.setdefault(num_tokens.bit_length() // 2, []).append((batch, num_tokens, seconds))
    knots = [statistics.fmean(n for _, n, _ in group) for _, group in sorted(by_knot.items())]
    # The cost of a token at the first knot. Fewer tokens are not measured, and a constant may belong to either curve.
    shortest = [sorted(group)[:2] for group in by_batch.values() if len(group) > 1]
    steps = [(n - n0, t - t0, t) for (n0, t0), (n, t) in shortest]
    slope_s = _slope([(n / t, more_s / t) for n, more_s, t in steps])
    context = Curve((0.0, max(1.0, *knots)), (0.0, slope_s * max(1.0, *knots)))
    for _ in range(_NUM_FITS):
        decode = _curve(
            [(b, _weighted_mean([(t - context(n), t) for n, t in group])) for b, group in sorted(by_batch.items())]
        )
        left = [_weighted_mean([(t - decode(b), t) for b, _, t in group]) for _, group in sorted(by_knot.items())]
        shift = left[0] - slope_s * knots[0]
        xs = (0.0, *(knot for knot in knots if knot > 0.0))
        ys = not_falling([0.0, *(max(0.0, y - shift) for y, knot in zip(left, knots, strict=True) if knot > 0.0)])
        context = Curve(xs, tuple(_rounded(y) for y in ys)) if len(xs) > 1 else context
    return decode, context


def _weighted_mean(pairs: Sequence[tuple[float, float]]) -> float:
    """The mean of (value, duration) pairs, where a value's error counts relative to its duration."""
    weights = [1.0 / duration_s**2 for _, duration_s in pairs]
    return sum(value * weight for (value, _), weight in zip(pairs, weights, strict=True)) / sum(weights)


def _slope(pairs: Sequence[tuple[float, float]]) -> float:
    """The slope of the line through the origin that fits best; at least 0."""
    squares = sum(x * x for x, _ in pairs)
    return max(0.0, sum(x * y for x, y in pairs) / squares) if squares else 0.0


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _rounded_link(link: Link) -> Link:
    return Link(_rounded(link.latency_s), _rounded(link.bytes_per_s))


def _words(shape: Shape) -> str:
    parts = [f"prefill of {shape.num_tokens} tokens after {shape.num_before}"] if shape.num_tokens else []
    if shape.num_requests:
        parts.append(f"decode of {shape.num_requests} requests after {shape.num_context_tokens} tokens")
    return ", ".join(parts)

"""Fits a profile to measured times."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from actorserve.core.timing.profile import Curve, Link, Profile, not_falling
from actorserve.profile_files import MeasuredShape
from workers.profile.engine_timer import Shape
from workers.profile.measure import Measurements

_NUM_FITS = 30


@dataclass(frozen=True, slots=True)
class Facts:
    """What a profile depends on in addition to the model. ``threads`` is 0 on a GPU."""

    dtype: str
    hardware: str
    threads: int


def make_profile(name: str, model: str, facts: Facts, kv_bytes_per_token: int, found: Measurements) -> Profile:
    """The profile that fits the measurements.

    Its errors are those of the shapes that it is compared with, and ``drift`` (``Measurements``).
    """
    seconds = {shape: timing.seconds for shape, timing in found.fitted.items()}
    prefills = {shape: t for shape, t in seconds.items() if shape.num_tokens and not shape.num_requests}
    decodes = [
        (shape.num_requests, shape.num_all_context_tokens, t) for shape, t in seconds.items() if not shape.num_tokens
    ]
    prefill = _curve(sorted((shape.num_tokens, t) for shape, t in prefills.items() if not shape.num_before))
    chunks = {shape: t for shape, t in prefills.items() if shape.num_before}
    context_s = _slope([(s.num_tokens * s.num_before, t - prefill(s.num_tokens)) for s, t in chunks.items()])
    decode, decode_context = _decode_curves(decodes)
    shortest_s = min(prefill.ys[0], decode.ys[0])
    profile = Profile(
        name=name,
        model=model,
        hardware=facts.hardware,
        dtype=facts.dtype,
        threads=facts.threads,
        prefill=prefill,
        prefill_context_s=_rounded(context_s),
        weights_s=min(shortest_s, _rounded(_further_chunk_s(prefill, chunks))),
        decode=decode,
        decode_context=decode_context,
        swap=_rounded_link(found.swap),
        transfer=_rounded_link(found.transfer),
        kv_bytes_per_token=kv_bytes_per_token,
    )
    mixed = {shape: t for shape, t in seconds.items() if shape.num_tokens and shape.num_requests}
    profile = replace(profile, decode_mixed_s=_rounded(_decode_mixed_s(profile, mixed)))
    stated = [("drift", round(found.drift, 4))]
    errors = [abs(profile_s(profile, shape) / each.seconds - 1.0) for shape, each in found.compared.items()]
    if errors:
        stated += [("mixed_max", round(max(errors), 4)), ("mixed_median", round(statistics.median(errors), 4))]
    return replace(profile, errors=tuple(stated))


def measured_shapes(found: Measurements) -> list[MeasuredShape]:
    """The measurements, for the profile's file."""
    return [
        MeasuredShape(*shape, _rounded(timing.seconds), round(timing.spread, 4))
        for shape, timing in (found.fitted | found.compared).items()
    ]


def _further_chunk_s(prefill: Curve, chunks: Mapping[Shape, float]) -> float:
    """The median time by which a prompt in two chunks takes longer than in one; at least 0.

    The whole prompt is within the measured lengths, because a curve beyond them is a guess.
    """
    longer_s = [
        seconds + prefill(shape.num_before) - prefill(shape.num_before + shape.num_tokens)
        for shape, seconds in chunks.items()
        if shape.num_before + shape.num_tokens <= prefill.xs[-1]
    ]
    return max(0.0, statistics.median(longer_s)) if longer_s else 0.0


def _decode_mixed_s(profile: Profile, mixed: Mapping[Shape, float]) -> float:
    """The median time by which each decode of a mixed iteration takes longer than a token of a prefill; at least 0."""
    longer_s = [(seconds - profile_s(profile, shape)) / shape.num_requests for shape, seconds in mixed.items()]
    return max(0.0, statistics.median(longer_s)) if longer_s else 0.0


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

"""``tools/profile --from-journal``: fits a worker's profile to the iterations that the worker ran.

A serving worker shares its machine with a gateway and its clients, so iterations take longer than in a measurement on
their own, and there are pauses between them. But a run does not show every shape. So the profile keeps its form: one
factor each for the decodes, their context and the prefills is fitted, and the pauses are taken from the run.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp, inf, log
from pathlib import Path

from rich.console import Console
from rich.table import Table

from actorserve.core.timing.profile import Curve, Link, Profile
from actorserve.errors import ProtocolError
from actorserve.profile_files import save_profile
from tools.journals.steps import Kind, RecordedStep, Recording, read_recording
from tools.profiling.errors import ProfilingError
from tools.profiling.output import prepare_file

_LEAST_STEPS = 20  # of a kind; fewer tell too little
_FACTOR_BOUNDS = (0.05, 20.0)
_NUM_FITS = 10


def calibrated(recording: Recording) -> Profile:
    """The recording's profile with the costs and pauses of its iterations, and the time of its swaps.

    The median of predicted over actual time is then 1 for iterations with prefills, and for those without. A kind of
    which there are too few iterations keeps its costs. Its error ``calibrated_median`` is the median over all
    iterations.
    """
    profile = recording.profile
    steps = [step for step in recording.steps if step.duration_s > 0.0]  # others tell nothing
    decodes = [step for step in steps if step.work.kind is Kind.DECODE]
    others = [step for step in steps if step.work.kind is not Kind.DECODE]
    if len(decodes) >= _LEAST_STEPS:
        decode, context = _decode_factors(profile, decodes)
        profile = _with_prefills(profile, 1.0, decode=decode, context=context)
        profile = _levelled(profile, decodes, lambda base, factor: _with_prefills(base, 1.0, factor, factor))
    if len(others) >= _LEAST_STEPS:
        profile = _levelled(profile, others, _with_prefills)
    if not steps:
        return profile
    errors = [abs(step.work.predicted_s(profile) / step.duration_s - 1.0) for step in steps]
    # The errors of the old costs say nothing about the new ones, but a drift has bent the curves that they keep.
    stated = {name: error for name, error in profile.errors if name == "drift"}
    stated["calibrated_median"] = round(statistics.median(errors), 4)
    pause_s, pause_row_s = fit_pauses(steps, (profile.pause_s, profile.pause_row_s))
    return replace(
        profile,
        pause_s=pause_s,
        pause_row_s=pause_row_s,
        swap=_rounded_link(recording.swap_link()),
        errors=tuple(sorted(stated.items())),
    )


def fit_pauses(steps: Sequence[RecordedStep], known: tuple[float, float] = (0.0, 0.0)) -> tuple[float, float]:
    """The pause before an iteration that was not planned ahead: ``Profile.pause_s`` and ``pause_row_s``.

    It is the line through the medians of each number of rows, weighted by how often that number occurred. Neither of
    the two is negative. ``known`` is the answer if there are too few such iterations. The first iteration does not
    count, because a cold engine takes longer.
    """
    found = [step for step in steps if not step.was_ahead and step.free_s > -inf]
    if len(found) < _LEAST_STEPS:
        return known
    pauses: dict[int, list[float]] = {}
    for step in found:
        pauses.setdefault(step.work.num_rows, []).append(step.pause_s)
    points = [(rows, statistics.median(each), len(each)) for rows, each in sorted(pauses.items())]
    total = sum(weight for _, _, weight in points)
    mean_rows = sum(rows * weight for rows, _, weight in points) / total
    mean_s = sum(seconds * weight for _, seconds, weight in points) / total
    squares = sum(weight * (rows - mean_rows) ** 2 for rows, _, weight in points)
    rises = sum(weight * (rows - mean_rows) * (seconds - mean_s) for rows, seconds, weight in points)
    row_s = min(max(0.0, rises / squares), max(0.0, mean_s / mean_rows)) if squares else 0.0
    return _rounded(max(0.0, mean_s - row_s * mean_rows)), _rounded(row_s)


def _decode_factors(profile: Profile, steps: Sequence[RecordedStep]) -> tuple[float, float]:
    """The factors of ``decode`` and ``decode_context`` that fit best, by relative errors.

    Outliers hardly count (iteratively reweighted least squares). Without evidence that tells the factors apart, they
    are the same.
    """
    rows = []
    for step in steps:
        decode_s = profile.decode(step.work.num_decodes)
        rows.append((decode_s, step.work.predicted_s(profile) - decode_s, step.duration_s))
    level = statistics.median(seconds / (decode_s + context_s) for decode_s, context_s, seconds in rows)
    factors = (level, level)
    for _ in range(_NUM_FITS):
        aa = ab = bb = ay = by = 0.0
        for decode_s, context_s, seconds in rows:
            a, b = decode_s / seconds, context_s / seconds
            weight = 1.0 / max(0.01, abs(1.0 - factors[0] * a - factors[1] * b))
            aa, ab, bb = aa + weight * a * a, ab + weight * a * b, bb + weight * b * b
            ay, by = ay + weight * a, by + weight * b
        same = 1e-3 * (aa + bb)  # pulls both factors to the common level
        aa, bb, ay, by = aa + same, bb + same, ay + same * level, by + same * level
        determinant = aa * bb - ab * ab
        factors = _bounded((ay * bb - by * ab) / determinant), _bounded((by * aa - ay * ab) / determinant)
    return factors


def _levelled(profile: Profile, steps: Sequence[RecordedStep], scale: Callable[[Profile, float], Profile]) -> Profile:
    """The profile scaled so that the median of predicted over actual time is 1."""
    factor, found = 1.0, profile
    for _ in range(_NUM_FITS):
        off = statistics.median(log(step.duration_s / step.work.predicted_s(found)) for step in steps)
        factor = _bounded(factor * exp(off))
        found = scale(profile, factor)
    return found


def _with_prefills(profile: Profile, factor: float, decode: float = 1.0, context: float = 1.0) -> Profile:
    """The profile with its prefills times ``factor``, and with other factors for the decodes and their context."""
    prefill, decodes = _scaled(profile.prefill, factor), _scaled(profile.decode, decode)
    return replace(
        profile,
        prefill=prefill,
        prefill_context_s=_rounded(factor * profile.prefill_context_s),
        weights_s=min(_rounded(factor * profile.weights_s), prefill.ys[0], decodes.ys[0]),
        decode=decodes,
        decode_mixed_s=_rounded(factor * profile.decode_mixed_s),
        decode_context=_scaled(profile.decode_context, context),
    )


def _scaled(curve: Curve, factor: float) -> Curve:
    return curve if factor == 1.0 else Curve(curve.xs, tuple(_rounded(factor * y) for y in curve.ys))


def _bounded(factor: float) -> float:
    low, high = _FACTOR_BOUNDS
    return min(max(factor, low), high)


def _rounded_link(link: Link) -> Link:
    return Link(_rounded(link.latency_s), _rounded(link.bytes_per_s))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def run(arguments: argparse.Namespace) -> int:
    """Fit, show and write. Raises: ProfilingError."""
    if arguments.output is None:
        raise ProfilingError(
            "--output is missing: expected a file, because a journal does not tell where its engine ran"
        )
    try:
        prepare_file(arguments.output)
        recording = read_recording(arguments.from_journal)
    except (OSError, ProtocolError) as error:
        raise ProfilingError(str(error)) from None
    base, steps = recording.profile, [step for step in recording.steps if step.duration_s > 0.0]
    if len(steps) < _LEAST_STEPS:
        raise ProfilingError(f"{arguments.from_journal} has {len(steps)} iterations: expected {_LEAST_STEPS} or more")
    profile = calibrated(recording)
    console = Console()
    table = Table("iterations", "", "before", "calibrated", title="predicted / actual", title_justify="left")
    for kind in Kind:
        found = [step for step in steps if step.work.kind is kind]
        if found:
            ratios = (
                statistics.median(step.work.predicted_s(each) / step.duration_s for step in found)
                for each in (base, profile)
            )
            table.add_row(kind.value, f"{len(found):,}", *(f"{ratio:.2f}" for ratio in ratios))
    console.print(table)
    console.print(
        f"pause: {1e3 * profile.pause_s:.2f} ms, {1e6 * profile.pause_row_s:.0f} us a request", highlight=False
    )
    try:
        save_profile(profile, arguments.output, f"Calibrated by tools/profile --from-journal {arguments.from_journal}.")
    except OSError as error:
        raise ProfilingError(f"cannot write {arguments.output}: {error}") from None
    console.print(f"written to {arguments.output}", markup=False, highlight=False, soft_wrap=True)
    return 0


def add_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from-journal",
        type=Path,
        metavar="FILE",
        help="fit the profile of a worker to the iterations in its journal (cluster.journal_dir), and measure nothing",
    )

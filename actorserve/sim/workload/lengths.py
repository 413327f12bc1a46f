"""How long prompts and outputs are: distributions by name, seeded."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from actorserve.errors import WorkloadError

_LEAST, _MOST = 1e-3, 1e7  # bounds of every parameter
_MAX_SHAPE: Final = 10.0  # larger SIGMA or ALPHA would make nearly all lengths MIN or MAX

_FORMS = {
    "fixed": ("fixed:N", 1),
    "uniform": ("uniform:MIN:MAX", 2),
    "lognormal": ("lognormal:MEDIAN:SIGMA:MAX", 3),
    "lognormal-mean": ("lognormal-mean:MEAN:SIGMA:MAX", 3),
    "powerlaw": ("powerlaw:MIN:MAX:ALPHA", 3),
    "powerlaw-mean": ("powerlaw-mean:MEAN:MAX", 2),
}
HELP = "N, " + ", ".join(form for form, _ in _FORMS.values())

PAIRS = {
    # Single turns of ShareGPT and Alpaca with the means of vLLM's paper: 161 and 338, and 19 and 58. It publishes no
    # numbers for the shapes; these lognormals have tails as long as its histograms show.
    "sharegpt": ("lognormal-mean:161:1.2:1024", "lognormal-mean:338:1.0:2048"),
    "alpaca": ("lognormal-mean:19:0.6:512", "lognormal-mean:58:1.0:1024"),
    # Fits of Azure's inference traces of 2023-11-11 (Splitwise).
    "azure-conversation": ("lognormal:757:0.99:14050", "lognormal:151:0.86:1000"),
    "azure-code": ("lognormal:1097:1.36:7437", "lognormal:16.3:0.85:1899"),
    # Conversations of BurstGPT: only the means are published, about 700 prompt and 250 output tokens. We chose the
    # shapes, and the bound of 6k tokens of Llumnix's generated lengths.
    "burstgpt": ("lognormal-mean:700:1.0:6144", "lognormal-mean:250:0.8:2048"),
    # Llumnix's generated lengths (section 6.1): power laws, short, medium and long in the mean, up to 6k.
    **{
        f"llumnix-{prompt}-{output}": (f"powerlaw-mean:{means[prompt]}:6144", f"powerlaw-mean:{means[output]}:6144")
        for means in ({"s": 128, "m": 256, "l": 512},)
        for prompt in means
        for output in means
    },
}
"""Distributions of prompt and output, by the name of the workload."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, each at least 1. ``draw`` uses only the given generator."""

    spec: str
    draw: Callable[[random.Random], int]


def parse_lengths(spec: str) -> Lengths:
    """Parse a distribution as a person types it: ``100``, ``fixed:100``, ``uniform:50:150``, ...

    Power law: P(x) ~ x^-alpha between MIN and MAX, drawn by inverting the continuous distribution. With a MEAN, MIN
    is 1 and alpha is solved for. A lognormal length above MAX becomes MAX; MEAN is the mean after that cut.

    Raises: WorkloadError.
    """
    kind, *texts = (f"fixed:{spec}" if spec.isdecimal() else spec).split(":")
    wrong = WorkloadError(f"no such length distribution: {spec[:80]!r}; give {HELP}")
    if kind not in _FORMS or len(texts) != _FORMS[kind][1]:
        raise wrong
    try:
        values = [float(text) for text in texts]
    except ValueError:
        raise wrong from None
    names = _FORMS[kind][0].split(":")[1:]
    for name, value in zip(names, values, strict=True):
        most = _MAX_SHAPE if name in ("SIGMA", "ALPHA") else _MOST
        if not _LEAST <= value <= most:
            raise WorkloadError(f"length distribution {spec!r}: {name} must be from {_LEAST:g} to {most:g}")
    match kind:
        case "fixed":
            return Lengths(spec, lambda _: max(1, round(values[0])))
        case "lognormal" | "lognormal-mean":
            middle, sigma, most = values
            if kind == "lognormal-mean":
                middle = _solve(spec, lambda median: _cut_lognormal_mean(median, sigma, most), middle, 1e-3, 1e3 * most)
            return Lengths(spec, lambda rng: max(1, round(min(most, middle * math.exp(rng.gauss(0.0, sigma))))))
        case "powerlaw-mean":
            mean, most = values
            alpha = -_solve(spec, lambda minus_alpha: _power_law_mean(most, -minus_alpha), mean, -8.0, 8.0)
            return Lengths(spec, lambda rng: max(1, round(_power_law(rng.random(), 1.0, most, alpha))))
    least, most = values[0], values[1]
    if least > most:
        raise WorkloadError(f"length distribution {spec!r}: MIN is above MAX")
    if kind == "uniform":
        return Lengths(spec, lambda rng: max(1, rng.randint(round(least), round(most))))
    return Lengths(spec, lambda rng: max(1, round(_power_law(rng.random(), least, most, values[2]))))


def _solve(spec: str, mean_of: Callable[[float], float], mean: float, low: float, high: float) -> float:
    """The parameter that gives ``mean``; the mean must grow with the parameter."""
    if not mean_of(low) < mean < mean_of(high):
        raise WorkloadError(f"length distribution {spec!r}: MEAN must lie between 1 and MAX")
    for _ in range(100):
        middle = (low + high) / 2.0
        low, high = (middle, high) if mean_of(middle) < mean else (low, middle)
    return low


def _cut_lognormal_mean(median: float, sigma: float, most: float) -> float:
    """The mean of min(X, most)."""
    normal = NormalDist(0.0, sigma)
    cut = math.log(most / median)
    whole = median * math.exp(sigma * sigma / 2.0) * normal.cdf(cut - sigma * sigma)
    return whole + most * (1.0 - normal.cdf(cut))


def _power_law_mean(most: float, alpha: float) -> float:
    """The mean of the continuous power law between 1 and ``most``."""

    def integral(power: float) -> float:
        return math.log(most) if abs(power + 1.0) < 1e-12 else (most ** (power + 1.0) - 1.0) / (power + 1.0)

    return integral(1.0 - alpha) / integral(-alpha)


def _power_law(chance: float, least: float, most: float, alpha: float) -> float:
    if abs(alpha - 1.0) < 1e-12:
        return least * math.exp(chance * math.log(most / least))
    exponent = 1.0 - alpha
    low, high = least**exponent, most**exponent
    return float((low + chance * (high - low)) ** (1.0 / exponent))

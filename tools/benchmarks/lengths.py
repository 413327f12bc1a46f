"""How long prompts and outputs are: distributions by name, seeded, and lengths read from a file."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.benchmarks.errors import BenchError

_FORMS = {
    "fixed": ("fixed:N", 1),
    "uniform": ("uniform:MIN:MAX", 2),
    "lognormal": ("lognormal:MEDIAN:SIGMA:MAX", 3),
    "powerlaw": ("powerlaw:MIN:MAX:ALPHA", 3),
}
HELP = "N, " + ", ".join(form for form, _ in _FORMS.values())


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, each at least 1. ``draw`` takes all of its chance from the given source."""

    spec: str
    draw: Callable[[random.Random], int]


def parse_lengths(spec: str) -> Lengths:
    """Read a distribution as a person types it: ``100``, ``fixed:100``, ``uniform:50:150``, ...

    Power law: P(x) ~ x^-alpha between MIN and MAX, drawn by inverting the continuous distribution.

    Raises: BenchError.
    """
    kind, *texts = (f"fixed:{spec}" if spec.isdecimal() else spec).split(":")
    wrong = BenchError(f"no such length distribution: {spec!r}; give {HELP}")
    if kind not in _FORMS or len(texts) != _FORMS[kind][1]:
        raise wrong
    try:
        values = [float(text) for text in texts]
    except ValueError:
        raise wrong from None
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise BenchError(f"length distribution {spec!r}: every number must be positive")
    if kind == "fixed":
        return Lengths(spec, lambda _: max(1, round(values[0])))
    if kind == "lognormal":
        median, sigma, most = values
        return Lengths(spec, lambda rng: max(1, round(min(most, median * math.exp(rng.gauss(0.0, sigma))))))
    least, most = values[0], values[1]
    if least > most:
        raise BenchError(f"length distribution {spec!r}: MIN is above MAX")
    if kind == "uniform":
        return Lengths(spec, lambda rng: max(1, rng.randint(round(least), round(most))))
    return Lengths(spec, lambda rng: max(1, round(_power_law(rng.random(), least, most, values[2]))))


def _power_law(chance: float, least: float, most: float, alpha: float) -> float:
    if alpha == 1.0:
        return least * math.exp(chance * math.log(most / least))
    exponent = 1.0 - alpha
    low, high = least**exponent, most**exponent
    return float((low + chance * (high - low)) ** (1.0 / exponent))

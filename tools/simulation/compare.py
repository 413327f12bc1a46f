"""``tools/simulate compare A B``: the results of two experiments, arm by arm."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from actorserve.errors import SimulationError
from tools.simulation.arms import ArmRuns, arms_of
from tools.simulation.figures import figure_of
from tools.simulation.report import LATENCIES, SHOWN_PERCENTILES, percent

_TOKENS_PER_S: Final = "throughput.output_tokens_per_s"
_MAX_DIFFERENT_KEYS = 12
_MAX_VALUE_CHARS = 60
_MARK = "*"


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of B over the same figure of A: the median over the seeds, each of which served the same requests in
    both, and the lowest and the highest.
    """

    median: float
    min: float
    max: float
    num_seeds: int

    @property
    def spread(self) -> float:
        """The highest ratio less the lowest."""
        return self.max - self.min

    @property
    def exceeds_spread(self) -> bool:
        """Whether A and B differ by more than the seeds do. Unknown, so not said, with one seed."""
        return self.num_seeds > 1 and abs(self.median - 1.0) > self.spread

    def __str__(self) -> str:
        spread = f" ({percent(self.spread)})" if self.num_seeds > 1 else ""
        return f"{self.median:.3f}{spread}{_MARK if self.exceeds_spread else ' '}"


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """An arm's run at one rate in both results. ``ratios`` by the figure's name; None if A or B has no such figure."""

    name: str
    rate_per_s: float | None
    ratios: Mapping[str, Ratio | None]


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[ComparedRun]:
    """Compare the values of two result files: all arms, at the rates and seeds that both have.

    Raises: SimulationError, if they have other arms, or an arm has no rate or no seed in both.
    """
    of_a, of_b = ({(arm.variant, arm.arm): arm for arm in arms_of(values["cases"])} for values in (a, b))
    for (here, arms), (there, others) in (((a, of_a), (b, of_b)), ((b, of_b), (a, of_a))):
        missing = [arm.name or "the run" for key, arm in arms.items() if key not in others]
        if missing:
            known = ", ".join(repr(arm.name) for arm in others.values())
            raise SimulationError(
                f"{missing[0]!r} of {here['name']} is missing in {there['name']}: expected the same variants and arms, "
                f"but there are {known}"
            )
    return [run for key, arm in of_a.items() for run in _compare_arm(arm, of_b[key])]


def _compare_arm(a: ArmRuns, b: ArmRuns) -> list[ComparedRun]:
    name = a.name or "the run"
    rates = [rate for rate in a.rates() if rate in b.rates()]
    if not rates:
        raise SimulationError(f"{name!r} ran {_rates(a)} and {_rates(b)}: expected a rate in both")
    found = []
    for rate in rates:
        seeds_of_b = {case["seed"]: case for case in b.cases}
        pairs = [
            (run_a, run_b)
            for case in a.cases
            if case["seed"] in seeds_of_b
            for run_a in case["runs"]
            for run_b in seeds_of_b[case["seed"]]["runs"]
            if run_a["rate_per_s"] == run_b["rate_per_s"] == rate
        ]
        if not pairs:
            raise SimulationError(
                f"{name!r} has the seeds {_seeds(a)} and {_seeds(b)}: expected one in both, because only the same "
                "requests can be compared"
            )
        names = [f"latency.{latency}.{percentile}" for latency, *_ in LATENCIES for percentile in SHOWN_PERCENTILES]
        found.append(ComparedRun(name, rate, {name: _ratio(pairs, name) for name in (*names, _TOKENS_PER_S)}))
    return found


def _ratio(pairs: list[tuple[dict[str, Any], dict[str, Any]]], name: str) -> Ratio | None:
    ratios = []
    for a, b in pairs:
        of_a, of_b = figure_of(a, name), figure_of(b, name)
        if not of_a or of_b is None:
            return None
        ratios.append(of_b / of_a)
    return Ratio(median(ratios), min(ratios), max(ratios), len(ratios))


def _rates(arm: ArmRuns) -> str:
    rates = ", ".join("the experiment's own rate" if rate is None else f"{rate:g}/s" for rate in arm.rates())
    return f"at {rates}" if rates else "not at all"


def _seeds(arm: ArmRuns) -> str:
    return ", ".join(str(case["seed"]) for case in arm.cases)


def show_comparison(a: Mapping[str, Any], b: Mapping[str, Any], console: Console) -> None:
    """Show in which settings the experiments differ, and the ratios. Raises: SimulationError (``compare``)."""
    compared = compare(a, b)
    for line in differing_keys(a["config"], b["config"]):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    ratios = [ratio for run in compared for ratio in run.ratios.values() if ratio is not None]
    num_seeds = max((ratio.num_seeds for ratio in ratios), default=0)
    if not num_seeds:
        caption = "No figure can be compared: in A or B a run has none of them, or they are 0 in A."
    elif num_seeds > 1:
        caption = (
            f"Medians of {num_seeds} seeds; in brackets, highest less lowest ratio. {_MARK} marks a difference that "
            "exceeds this spread."
        )
    else:
        caption = "With one seed, any difference may be chance: give both experiments seeds = [1, 2, 3]."
    table = Table(title="B over A", caption=caption, caption_justify="left", show_lines=True)
    table.add_column("run", max_width=30)
    table.add_column("figure", no_wrap=True)
    for percentile in SHOWN_PERCENTILES:
        table.add_column(percentile.upper(), justify="right", no_wrap=True)
    for run in compared:
        columns = [
            [*(_text(run.ratios[f"latency.{latency}.{percentile}"]) for latency, *_ in LATENCIES), ""]
            for percentile in SHOWN_PERCENTILES
        ]
        columns[0][-1] = _text(run.ratios[_TOKENS_PER_S])
        figures = [*(name for _, name, _, _ in LATENCIES), "tokens/s"]
        rate = "" if run.rate_per_s is None else f"\nat {run.rate_per_s:.3g}/s"
        table.add_row(run.name + rate, "\n".join(figures), *("\n".join(column) for column in columns))
    console.print(table)


def _text(ratio: Ratio | None) -> str:
    return "none " if ratio is None else str(ratio)


def differing_keys(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """One line for each key of two configurations whose values differ; the first of them."""
    flat_a, flat_b = (_flat(values, "") for values in (a, b))
    keys = [key for key in sorted({**flat_a, **flat_b}) if flat_a.get(key) != flat_b.get(key)]
    lines = []
    for key in keys[:_MAX_DIFFERENT_KEYS]:
        of_a, of_b = _cut(*(repr(flat[key]) if key in flat else "none" for flat in (flat_a, flat_b)))
        lines.append(f"{key}: A {of_a}, B {of_b}")
    more = len(keys) - len(lines)
    return [*lines, *([f"and {more} more keys differ"] if more else [])]


def _flat(value: Any, path: str) -> dict[str, Any]:
    """The values of tables, also of tables in lists, by their dotted keys."""
    if isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value):
        value = {str(place): part for place, part in enumerate(value)}
    if isinstance(value, Mapping):
        inner = [_flat(part, f"{path}.{key}" if path else key) for key, part in value.items()]
        return {key: part for table in inner for key, part in table.items()}
    return {path: value}


def _cut(a: str, b: str) -> tuple[str, str]:
    """Two texts, each of which is cut to the part in which they begin to differ."""
    num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    begin = num_equal - _MAX_VALUE_CHARS // 2 if num_equal >= _MAX_VALUE_CHARS else 0
    return _part(a, begin), _part(b, begin)


def _part(text: str, begin: int) -> str:
    end = begin + _MAX_VALUE_CHARS
    return ("..." if begin else "") + text[begin:end] + ("..." if end < len(text) else "")

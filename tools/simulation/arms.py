"""The runs of one arm on one variant: at several rates, and with several seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tools.simulation.figures import figure_of


@dataclass(frozen=True, slots=True)
class ArmRuns:
    """``cases`` are those of a result file, one for each seed."""

    variant: str
    arm: str
    x: float | None
    cases: tuple[dict[str, Any], ...]

    @property
    def name(self) -> str:
        return " ".join((self.variant, self.arm)).strip()

    def rates(self) -> list[float | None]:
        """The rates of all runs, growing; None is the experiment's own arrivals."""
        found = {run["rate_per_s"] for case in self.cases for run in case["runs"]}
        return sorted(found, key=lambda rate: rate or 0.0)

    def runs(self, rate_per_s: float | None) -> list[dict[str, Any]]:
        """The runs at this rate, one for each seed that has one."""
        return [run for case in self.cases for run in case["runs"] if run["rate_per_s"] == rate_per_s]

    def values(self, rate_per_s: float | None, name: str) -> list[float]:
        """A figure of each of these runs that has it."""
        found = (figure_of(run, name) for run in self.runs(rate_per_s))
        return [value for value in found if value is not None]

    def held(self, goal: str) -> float | None:
        """The median over the seeds of the highest rate that holds this goal. A seed that holds no rate counts as below
        all rates, so None means that the median is below the lowest rate that was tried.
        """
        ordered = sorted((case["held"][goal] for case in self.cases), key=lambda rate: rate or 0.0)
        middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
        return None if None in middle else median(middle)


def arms_of(cases: Sequence[dict[str, Any]]) -> list[ArmRuns]:
    """The arms in the order of their first cases."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in cases:
        found.setdefault((case["variant"], case["arm"]), []).append(case)
    return [ArmRuns(variant, arm, arm_cases[0]["x"], tuple(arm_cases)) for (variant, arm), arm_cases in found.items()]


def medians_over_seeds(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One case for each arm, whose figures are the medians over its seeds."""
    return [
        {
            "variant": arm.variant,
            "arm": arm.arm,
            "x": arm.x,
            "runs": [_median(arm.runs(rate)) for rate in arm.rates()],
            "held": {goal: arm.held(goal) for goal in arm.cases[0]["held"]},
        }
        for arm in arms_of(cases)
    ]


def _median(found: list[Any]) -> Any:
    """The median of numbers, of tables entry by entry, and else the first. None counts for nothing, because a seed may
    have no such figure: for example, none of its requests migrated.
    """
    present = [value for value in found if value is not None]
    if not present:
        return None
    tables = [value for value in present if isinstance(value, dict)]
    if tables:
        keys = dict.fromkeys(key for table in tables for key in table)
        return {key: _median([table.get(key) for table in tables]) for key in keys}
    numbers = [value for value in present if isinstance(value, int | float)]
    return median(numbers) if len(present) > 1 and numbers else present[0]

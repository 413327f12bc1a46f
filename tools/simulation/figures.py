"""Figures of a run by their names: dotted paths into ``Results.figures``, as ``latency.ttft_s.p99``."""

from typing import Any, Final

ROOTS: Final = (
    "classes",
    "failovers",
    "fragmentation",
    "instances",
    "latency",
    "migration",
    "preemption",
    "preemptions",
    "recovery_s",
    "requests",
    "swap",
    "throughput",
    "utilisation",
)
"""What a figure's name may begin with."""


def figure_of(run: dict[str, Any], name: str) -> float | None:
    """None if the run has no such figure, for example because no request moved."""
    found: Any = run
    for part in name.split("."):
        if not isinstance(found, dict) or part not in found:
            return None
        found = found[part]
    return float(found) if isinstance(found, int | float) else None

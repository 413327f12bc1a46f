"""The scheduling policies by the names that settings and benchmarks give them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from actorserve.core.scheduling.baselines import FixedPriority, NaiveMLFQ, ShortestRemainingTime
from actorserve.core.scheduling.mlfq import PROMOTE_AFTER_S, SkipJoinMLFQ
from actorserve.core.scheduling.policy import FirstComeFirstServed, SchedulingPolicy
from actorserve.core.scheduling.priority_classes import PriorityClasses
from actorserve.core.timing.step_times import StepTimes

MIN_SHARE = 0.1

POLICIES: Mapping[str, Callable[[StepTimes, float], SchedulingPolicy]] = MappingProxyType(
    {
        "skip_join_mlfq": lambda times, promote_after_s: SkipJoinMLFQ(times, promote_after_s=promote_after_s),
        "fcfs": lambda times, promote_after_s: FirstComeFirstServed(),
        "naive_mlfq": lambda times, promote_after_s: NaiveMLFQ(times, promote_after_s=promote_after_s),
        "fixed_priority": lambda times, promote_after_s: FixedPriority(times),
        # For the simulator and benchmarks only.
        "srpt": lambda times, promote_after_s: ShortestRemainingTime(times),
        "fcfs_reserving": lambda times, promote_after_s: FirstComeFirstServed(reserves_output=True),
    }
)
"""The policy of one priority class, given the times of iterations and how long a request waits for its promotion."""


def make_policy(
    name: str,
    times: StepTimes,
    *,
    promote_after_s: float = PROMOTE_AFTER_S,
    promote_after_s_of: Mapping[int, float] = MappingProxyType({}),
    min_share: float = MIN_SHARE,
) -> PriorityClasses:
    """The policy ``name``, in each priority class.

    ``promote_after_s_of`` has the promotion times, by priority, of classes with an SLO of their own.
    Raises: ValueError for an unknown name, and for values that no policy can work with.
    """
    make = POLICIES.get(name)
    if make is None:
        raise ValueError(f"unknown policy {name!r}; expected one of {', '.join(POLICIES)}")
    for priority, seconds in promote_after_s_of.items():
        if not seconds > 0.0:
            raise ValueError(f"promote_after_s of priority {priority} is {seconds:g}; expected a time above 0 s")
    return PriorityClasses(
        lambda priority: make(times, promote_after_s_of.get(priority, promote_after_s)), min_share=min_share
    )

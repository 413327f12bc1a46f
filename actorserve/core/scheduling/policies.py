"""The scheduling policies by the names that settings and benchmarks give them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from actorserve.core.prediction.learned import LearnedLengths
from actorserve.core.prediction.predictor import LengthPredictor, LimitedLengths
from actorserve.core.scheduling.baselines import (
    FixedPriority,
    NaiveMLFQ,
    PaperSkipJoinMLFQ,
    ShortestRemainingTime,
)
from actorserve.core.scheduling.mlfq import PROMOTE_AFTER_S, SkipJoinMLFQ
from actorserve.core.scheduling.policy import FirstComeFirstServed, SchedulingPolicy
from actorserve.core.scheduling.priority_classes import PriorityClasses
from actorserve.core.scheduling.shortest_expected import ShortestExpected
from actorserve.core.timing.step_times import StepTimes

MIN_SHARE = 0.1

POLICIES: Mapping[str, Callable[[StepTimes, float, LengthPredictor], SchedulingPolicy]] = MappingProxyType(
    {
        "skip_join_mlfq": lambda times, promote_after_s, predictor: SkipJoinMLFQ(
            times, promote_after_s=promote_after_s
        ),
        "shortest_expected": lambda times, promote_after_s, predictor: ShortestExpected(times, predictor),
        "fcfs": lambda times, promote_after_s, predictor: FirstComeFirstServed(),
        "naive_mlfq": lambda times, promote_after_s, predictor: NaiveMLFQ(times, promote_after_s=promote_after_s),
        "fixed_priority": lambda times, promote_after_s, predictor: FixedPriority(times),
        # For the simulator and benchmarks only.
        "paper_skip_join_mlfq": lambda times, promote_after_s, predictor: PaperSkipJoinMLFQ(
            times, promote_after_s=promote_after_s
        ),
        "srpt": lambda times, promote_after_s, predictor: ShortestRemainingTime(times),
        "fcfs_reserving": lambda times, promote_after_s, predictor: FirstComeFirstServed(reserves_output=True),
    }
)
"""The policy of one priority class, given the times of iterations, how long a request waits for its promotion, and what
predicts the lengths of outputs."""


def make_policy(
    name: str,
    times: StepTimes,
    *,
    promote_after_s: float = PROMOTE_AFTER_S,
    promote_after_s_of: Mapping[int, float] = MappingProxyType({}),
    min_share: float = MIN_SHARE,
    predictor: LengthPredictor | None = None,
) -> PriorityClasses:
    """The policy ``name``, in each priority class. All classes share one ``predictor``; None: a new one, which learns.

    ``promote_after_s_of`` has the promotion times, by priority, of classes with an SLO of their own.
    Raises: ValueError for an unknown name, and for values that no policy can work with.
    """
    make = POLICIES.get(name)
    if make is None:
        raise ValueError(f"unknown policy {name!r}; expected one of {', '.join(POLICIES)}")
    for priority, seconds in promote_after_s_of.items():
        if not seconds > 0.0:
            raise ValueError(f"promote_after_s of priority {priority} is {seconds:g}; expected a time above 0 s")
    predicts = LimitedLengths(LearnedLengths()) if predictor is None else predictor
    return PriorityClasses(
        lambda priority: make(times, promote_after_s_of.get(priority, promote_after_s), predicts), min_share=min_share
    )

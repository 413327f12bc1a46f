"""A simulated engine whose iterations take as long as those of a recorded run, instead of what a profile predicts.

What remains between the simulated run and the recorded one is then the simulator's schedule alone.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from actorserve.core.timing.profile import Profile
from actorserve.sim.engine_model import EngineModel
from tools.journals.steps import RecordedStep, Work

_NUM_NEAR = 32  # recorded iterations to look at, before and after the simulated one
_ALIKE = 0.02  # iterations whose sizes differ by less, relatively, are taken for alike

_Sizes = tuple[float, float, float]  # logarithms of the numbers of rows, tokens, and tokens before them


class RecordedTimes:
    """The times of recorded iterations. ``began_s`` is the time of the recording's clock at the simulation's time 0.

    The time for a simulated iteration is that of a recorded one. Both have prefills or both have none, and both were
    planned ahead or both were not. Among those that ran at about the same time, it is the one with the most similar
    numbers of rows, tokens and tokens of context. The ratio of the times that ``profile`` predicts for both corrects
    its duration. So the profile's level does not matter, and the recording machine's slow and fast times come at their
    times.
    """

    def __init__(self, steps: Sequence[RecordedStep], profile: Profile, began_s: float) -> None:
        self._profile = profile
        self._began_s = began_s
        self._groups: dict[tuple[bool, bool], list[tuple[float, _Sizes, RecordedStep]]] = {}
        for step in steps:
            key = bool(step.work.chunks), step.was_ahead
            begun_s = max(step.planned_s, step.free_s)
            self._groups.setdefault(key, []).append((begun_s, _sizes(step.work), step))

    def times_of(self, work: Work, at_s: float, *, was_ahead: bool) -> tuple[float, float]:
        """The pause and the duration of a simulated iteration that begins at ``at_s``. Without a recorded iteration of
        its group, the profile's time without a pause.
        """
        key = bool(work.chunks), was_ahead
        group = self._groups.get(key) or self._groups.get((key[0], not was_ahead))
        expected_s = work.predicted_s(self._profile)
        if not group:
            return 0.0, expected_s
        sizes, now = _sizes(work), at_s + self._began_s
        place = bisect_left(group, now, key=lambda each: each[0])
        _, _, best = min(
            group[max(0, place - _NUM_NEAR) : place + _NUM_NEAR],
            key=lambda each: (round(_distance(each[1], sizes) / _ALIKE), abs(each[0] - now)),
        )
        return best.pause_s, best.duration_s * expected_s / best.work.predicted_s(self._profile)


def _sizes(work: Work) -> _Sizes:
    num_tokens = sum(tokens for tokens, _ in work.chunks) + work.num_decodes
    num_before = sum(before for _, before in work.chunks) + work.num_context_tokens
    return math.log(work.num_rows), math.log(num_tokens), math.log1p(num_before)


def _distance(first: _Sizes, second: _Sizes) -> float:
    return sum(abs(one - other) for one, other in zip(first, second, strict=True))


class RecordedEngine(EngineModel):
    """An ``EngineModel`` with recorded times of iterations. Copies take the profile's times."""

    def __init__(self, times: RecordedTimes, *arguments: Any, **options: Any) -> None:
        """``arguments`` and ``options``: as of an ``EngineModel``."""
        super().__init__(*arguments, **options)
        self._times = times
        self._has_pauses = True

    def _time_step(
        self,
        chunks: Sequence[tuple[int, int]],
        num_decodes: int,
        num_context_tokens: int,
        planned_s: float,
        free_s: float,
    ) -> tuple[float, float]:
        work = Work(tuple(chunks), num_decodes, num_context_tokens)
        begins_s = max(free_s, planned_s)
        pause_s, duration_s = self._times.times_of(work, begins_s, was_ahead=planned_s < free_s)
        return begins_s + pause_s, duration_s

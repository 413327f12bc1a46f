"""What a move cost, from the times of tokens at the gateway and from the processes' journals."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from actorserve.core.messages import CopyDone, HandOver, Offer, Stage, Start, StepDone, Transfer
from actorserve.wire.journal import Entry
from tools.benchmarks.common.errors import BenchError
from tools.figures.figure import Figure

PARTS = {
    "last_stage_s": "the last stage reaches the destination",
    "copy_s": "the KV is copied",
    "hand_over_s": "the gateway is asked",
    "start_s": "the destination is told to start the request",
    "wait_s": "the destination's step in flight ends",
    "first_step_s": "the request's first step at the destination",
    "deliver_s": "the token reaches the gateway",
}
"""The parts of a downtime in their order, from the source's last token to the destination's first."""

MAX_STEPS = 2.0
MAX_STEPS_RATIO = 1.2
MAX_SLOWDOWN = 1.03


@dataclass(frozen=True, slots=True)
class Move:
    """One request's move.

    ``downtime_s`` is the time from the source's last token to the destination's first, ``longest_gap_s`` the longest
    time between two tokens after the order, and ``step_s`` the median time before the order. ``duration_s``
    is the time from the order to the hand-over. ``has_adopted``: the destination continued from copied KV and computed
    none of it again. ``slowdown`` is the neighbours' time per token during the move over that before it, by side;
    None without neighbours. ``parts`` split the downtime; empty if no KV was copied.
    """

    context_tokens: int
    way: str
    step_s: float
    downtime_s: float
    longest_gap_s: float
    duration_s: float
    has_adopted: bool
    num_stages: int
    copied_bytes: int
    slowdown: dict[str, float | None]
    parts: dict[str, float]

    @property
    def downtime_steps(self) -> float:
        return self.downtime_s / self.step_s


@dataclass(frozen=True, slots=True)
class MoveSummary:
    """The moves of one way at one context length, over all rounds. ``copied_bytes`` and ``parts`` are medians."""

    context_tokens: int
    way: str
    num_moves: int
    num_adopted: int
    step_ms: Figure
    downtime_ms: Figure
    downtime_steps: Figure
    longest_gap_steps: Figure
    duration_ms: Figure
    num_stages: float
    copied_bytes: float
    slowdown: dict[str, Figure | None]
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class Goal:
    """``value`` should be at most ``limit``."""

    name: str
    value: float
    limit: float

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit


def usual_gap_s(times_s: Sequence[float], from_s: float, until_s: float) -> float:
    """The median time between two tokens from ``from_s`` to ``until_s``. Raises: BenchError, if there are too few."""
    chosen = times_s[bisect_left(times_s, from_s) : bisect_right(times_s, until_s)]
    if len(chosen) < 3:
        raise BenchError("too few tokens were made before the move")
    return median(later - earlier for earlier, later in pairwise(chosen))


def gaps_of(times_s: Sequence[float], ordered_s: float, handed_over_s: float) -> tuple[float, float]:
    """The gap between two tokens at the hand-over, and the longest gap from the order until then.

    Raises: BenchError, if no token came after the hand-over.
    """
    end = bisect_right(times_s, handed_over_s)
    if not 0 < end < len(times_s):
        raise BenchError("no token came after the move")
    begin = min(end, max(1, bisect_right(times_s, ordered_s)))
    gaps_s = [times_s[place] - times_s[place - 1] for place in range(begin, end + 1)]
    return gaps_s[-1], max(gaps_s)


def tokens_by(times_s: Sequence[float], at_s: float) -> float:
    """The number of tokens after the first until ``at_s``. If ``at_s`` lies between two tokens, a fraction is added for
    the part of that time that has passed.
    """
    count = bisect_right(times_s, at_s)
    if count in (0, len(times_s)):
        return float(max(0, count - 1))
    before, after = times_s[count - 1], times_s[count]
    return count - 1 + (at_s - before) / (after - before)


def slowdown_of(streams: Sequence[Sequence[float]], steady_s: float, begin_s: float, end_s: float) -> float | None:
    """The streams' time per token from ``begin_s`` to ``end_s``, over that from ``steady_s`` to ``begin_s``.

    None without streams. Raises: BenchError, if a stream did not decode all that time.
    """
    if not streams:
        return None
    if any(times_s[0] > steady_s or times_s[-1] < end_s for times_s in streams):
        raise BenchError("the neighbours did not decode all that time")
    before = sum(tokens_by(times_s, begin_s) - tokens_by(times_s, steady_s) for times_s in streams)
    during = sum(tokens_by(times_s, end_s) - tokens_by(times_s, begin_s) for times_s in streams)
    return (before / (begin_s - steady_s)) / (during / (end_s - begin_s))


def num_stages(destination: Sequence[Entry], migration: Transfer) -> int:
    """The number of stages in which the KV was copied."""
    return sum(_is_stage(entry, migration) for entry in destination)


def parts_of(
    gateway: Sequence[Entry],
    destination: Sequence[Entry],
    migration: Transfer,
    request_id: str,
    last_token_s: float,
    first_token_s: float,
) -> dict[str, float]:
    """The parts (PARTS) of the time from the source's last token to the destination's first.

    Raises: BenchError, if they lack a message of the migration.
    """
    stages_s = [entry.now for entry in destination if _is_stage(entry, migration)]
    asked_s = [
        entry.now for entry in gateway if isinstance(entry.message, HandOver) and entry.message.request_id == request_id
    ]
    started_s = [
        entry.now for entry in destination if isinstance(entry.message, Start) and entry.message.transfer == migration
    ]
    steps = [
        (entry.now, entry.message.duration_s)
        for entry in destination
        if isinstance(entry.message, StepDone) and request_id in entry.message.request_ids
    ]
    if not (stages_s and asked_s and started_s and steps):
        raise BenchError(f"the journals do not show how {request_id} moved")
    stage_s, begun_s = stages_s[-1], steps[0][0] - steps[0][1]
    copies_s = [
        entry.now
        for entry in destination
        if isinstance(entry.message, CopyDone) and stage_s <= entry.now <= started_s[0]
    ]
    copied_s = copies_s[0] if copies_s else stage_s  # without a copy the destination had all KV cached
    points = (last_token_s, stage_s, copied_s, asked_s[0], started_s[0], begun_s, steps[0][0], first_token_s)
    return {name: later - earlier for name, (earlier, later) in zip(PARTS, pairwise(points), strict=True)}


def _is_stage(entry: Entry, migration: Transfer) -> bool:
    message = entry.message
    return entry.sender == migration.source and isinstance(message, Offer | Stage) and message.transfer == migration.id


def summary_of(moves: Sequence[Move]) -> MoveSummary:
    """Sum up the moves of one way at one length."""
    first = moves[0]
    slowdown: dict[str, Figure | None] = {}
    for side in first.slowdown:
        values = [value for move in moves if (value := move.slowdown[side]) is not None]
        slowdown[side] = Figure.of(values) if values else None
    return MoveSummary(
        context_tokens=first.context_tokens,
        way=first.way,
        num_moves=len(moves),
        num_adopted=sum(move.has_adopted for move in moves),
        step_ms=Figure.of([1e3 * move.step_s for move in moves]),
        downtime_ms=Figure.of([1e3 * move.downtime_s for move in moves]),
        downtime_steps=Figure.of([move.downtime_steps for move in moves]),
        longest_gap_steps=Figure.of([move.longest_gap_s / move.step_s for move in moves]),
        duration_ms=Figure.of([1e3 * move.duration_s for move in moves]),
        num_stages=median(move.num_stages for move in moves),
        copied_bytes=median(move.copied_bytes for move in moves),
        slowdown=slowdown,
        parts={name: median(move.parts[name] for move in moves) for name in first.parts},
    )


def goals_of(summaries: Sequence[MoveSummary]) -> list[Goal]:
    """The goals of live migration over all of its context lengths."""
    live = sorted(
        (summary for summary in summaries if summary.way == "live"), key=lambda summary: summary.context_tokens
    )
    if not live:
        return []
    steps = [summary.downtime_steps.median for summary in live]
    goals = [
        Goal("downtime in decode steps, at the worst length", max(steps), MAX_STEPS),
        Goal(
            f"downtime in steps at {live[-1].context_tokens} tokens over that at {live[0].context_tokens}",
            steps[-1] / steps[0],
            MAX_STEPS_RATIO,
        ),
    ]
    for side in live[0].slowdown:
        values = [figure.median for summary in live if (figure := summary.slowdown[side]) is not None]
        if values:
            goals.append(
                Goal(f"neighbours at the {side}, time per token over that before", median(values), MAX_SLOWDOWN)
            )
    return goals


def by_length(summaries: Sequence[MoveSummary]) -> Mapping[int, dict[str, MoveSummary]]:
    """For each context length the summary of each way."""
    found: dict[int, dict[str, MoveSummary]] = {}
    for summary in summaries:
        found.setdefault(summary.context_tokens, {})[summary.way] = summary
    return found

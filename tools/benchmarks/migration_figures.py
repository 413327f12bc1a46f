"""What a move cost, from the times of tokens at the gateway and from what the processes' journals tell."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from actorserve.core.messages import CopyDone, HandOver, Offer, Stage, Start, StepDone, Transfer
from actorserve.wire.journal import Entry
from tools.benchmarks.errors import BenchError

PARTS = {
    "last_stage_s": "the last stage reaches the destination",
    "copy_s": "its KV is copied",
    "hand_over_s": "the gateway is asked",
    "start_s": "the destination is told to start it",
    "wait_s": "the step in flight there ends",
    "first_step_s": "its first step there",
    "deliver_s": "the token reaches the gateway",
}
"""Of a downtime, in order; from the last token of the source to the first of the destination."""

MAX_STEPS = 2.0
MAX_STEPS_RATIO = 1.2
MAX_SLOWDOWN = 1.03


@dataclass(frozen=True, slots=True)
class Move:
    """One request's move. ``downtime_s`` lies between its last token of the source and its first of the destination,
    ``longest_gap_s`` between any two from the order on, ``step_s`` usually between two before.

    ``duration_s``: from the order until it was handed over. ``has_adopted``: the destination went on with KV that was
    copied, else it computed that anew. ``slowdown`` is each side's neighbours' time a token meanwhile over that before;
    None where there are none. ``parts`` are of the downtime; empty where no KV moved.
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
class Figures:
    """Medians over one way's moves at one length."""

    context_tokens: int
    way: str
    num_moves: int
    num_adopted: int
    step_s: float
    downtime_s: float
    downtime_steps: float
    worst_downtime_steps: float
    longest_gap_steps: float
    duration_s: float
    num_stages: float
    copied_bytes: float
    slowdown: dict[str, float | None]
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class Goal:
    """``value`` is to be at most ``limit``."""

    name: str
    value: float
    limit: float

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit


def usual_gap_s(times_s: Sequence[float], from_s: float, until_s: float) -> float:
    """The median time between two tokens of those from ``from_s`` to ``until_s``. Raises: BenchError, for too few."""
    chosen = times_s[bisect_left(times_s, from_s) : bisect_right(times_s, until_s)]
    if len(chosen) < 3:
        raise BenchError("too few tokens were made before the move")
    return median(later - earlier for earlier, later in pairwise(chosen))


def gaps_of(times_s: Sequence[float], ordered_s: float, handed_over_s: float) -> tuple[float, float]:
    """The time between the last token before it was handed over and the first one after, and the longest time between
    two tokens of those until then, of which the later came after the order. Raises: BenchError, where none came after.
    """
    end = bisect_right(times_s, handed_over_s)
    if not 0 < end < len(times_s):
        raise BenchError("no token came after the move")
    begin = min(end, max(1, bisect_right(times_s, ordered_s)))
    gaps_s = [times_s[place] - times_s[place - 1] for place in range(begin, end + 1)]
    return gaps_s[-1], max(gaps_s)


def tokens_by(times_s: Sequence[float], at_s: float) -> float:
    """How many tokens came after the first one until then, and how much of the next one's time had passed: windows need
    not end with a token.
    """
    count = bisect_right(times_s, at_s)
    if count in (0, len(times_s)):
        return float(max(0, count - 1))
    before, after = times_s[count - 1], times_s[count]
    return count - 1 + (at_s - before) / (after - before)


def slowdown_of(streams: Sequence[Sequence[float]], steady_s: float, begin_s: float, end_s: float) -> float | None:
    """The time a token of all these from ``begin_s`` to ``end_s``, over that from ``steady_s`` to ``begin_s``.

    None where there are none. Raises: BenchError, where one did not decode all the while.
    """
    if not streams:
        return None
    if any(times_s[0] > steady_s or times_s[-1] < end_s for times_s in streams):
        raise BenchError("the neighbours did not decode all the while")
    before = sum(tokens_by(times_s, begin_s) - tokens_by(times_s, steady_s) for times_s in streams)
    during = sum(tokens_by(times_s, end_s) - tokens_by(times_s, begin_s) for times_s in streams)
    return (before / (begin_s - steady_s)) / (during / (end_s - begin_s))


def num_stages(destination: Sequence[Entry], migration: Transfer) -> int:
    """How many stages it was copied in."""
    return sum(_is_stage(entry, migration) for entry in destination)


def parts_of(
    gateway: Sequence[Entry],
    destination: Sequence[Entry],
    migration: Transfer,
    request_id: str,
    last_token_s: float,
    first_token_s: float,
) -> dict[str, float]:
    """Where the time from its last token of the source to its first of the destination went (PARTS).

    Journals count milliseconds. Raises: BenchError, where they do not tell.
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
        raise BenchError(f"the journals do not tell how {request_id} moved")
    stage_s, begun_s = stages_s[-1], steps[0][0] - steps[0][1]
    copies_s = [
        entry.now
        for entry in destination
        if isinstance(entry.message, CopyDone) and stage_s <= entry.now <= started_s[0]
    ]
    copied_s = copies_s[0] if copies_s else stage_s  # all of it was cached there
    points = (last_token_s, stage_s, copied_s, asked_s[0], started_s[0], begun_s, steps[0][0], first_token_s)
    return {name: later - earlier for name, (earlier, later) in zip(PARTS, pairwise(points), strict=True)}


def _is_stage(entry: Entry, migration: Transfer) -> bool:
    message = entry.message
    return entry.sender == migration.source and isinstance(message, Offer | Stage) and message.transfer == migration.id


def figures_of(moves: Sequence[Move]) -> Figures:
    """Of moves of one way at one length."""
    first = moves[0]
    slowdown: dict[str, float | None] = {}
    for side in first.slowdown:
        values = [value for move in moves if (value := move.slowdown[side]) is not None]
        slowdown[side] = median(values) if values else None
    return Figures(
        context_tokens=first.context_tokens,
        way=first.way,
        num_moves=len(moves),
        num_adopted=sum(move.has_adopted for move in moves),
        step_s=median(move.step_s for move in moves),
        downtime_s=median(move.downtime_s for move in moves),
        downtime_steps=median(move.downtime_steps for move in moves),
        worst_downtime_steps=max(move.downtime_steps for move in moves),
        longest_gap_steps=median(move.longest_gap_s / move.step_s for move in moves),
        duration_s=median(move.duration_s for move in moves),
        num_stages=median(move.num_stages for move in moves),
        copied_bytes=median(move.copied_bytes for move in moves),
        slowdown=slowdown,
        parts={name: median(move.parts[name] for move in moves) for name in first.parts},
    )


def goals_of(figures: Sequence[Figures]) -> list[Goal]:
    """Of live migration, by all of its lengths."""
    live = sorted((each for each in figures if each.way == "live"), key=lambda each: each.context_tokens)
    if not live:
        return []
    goals = [
        Goal("downtime in decode steps, at the worst length", max(each.downtime_steps for each in live), MAX_STEPS),
        Goal(
            f"downtime in steps at {live[-1].context_tokens} tokens over that at {live[0].context_tokens}",
            live[-1].downtime_steps / live[0].downtime_steps,
            MAX_STEPS_RATIO,
        ),
    ]
    for side in live[0].slowdown:
        values = [value for each in live if (value := each.slowdown[side]) is not None]
        if values:
            goals.append(Goal(f"neighbours at the {side}, time a token over that before", median(values), MAX_SLOWDOWN))
    return goals


def by_length(figures: Sequence[Figures]) -> Mapping[int, dict[str, Figures]]:
    """Of each length each way's figures."""
    found: dict[int, dict[str, Figures]] = {}
    for each in figures:
        found.setdefault(each.context_tokens, {})[each.way] = each
    return found

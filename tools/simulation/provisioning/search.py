"""The smallest sizes of a design that hold a load, and the sizes of several designs that none of the others beats."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Counts = tuple[int, ...]
IsHeld = Callable[[Counts], bool]


@dataclass(frozen=True, slots=True)
class Size:
    """A cluster that holds the load: its design, the machines of each group, and what they cost and draw."""

    design: str
    counts: Counts
    cost_per_hour: float
    watts: float

    def is_beaten_by(self, other: "Size") -> bool:
        """Whether the other one costs no more and draws no more, and less of one."""
        mine, its = (self.cost_per_hour, self.watts), (other.cost_per_hour, other.watts)
        return all(theirs <= own for theirs, own in zip(its, mine, strict=True)) and its != mine


def smallest_sizes(choices: Sequence[Sequence[int]], is_held: IsHeld) -> list[Counts]:
    """The sizes from which no group can lose a machine, as far as the choices tell.

    ``choices``: the numbers of machines that each of one or two groups may have, growing. More machines are assumed to
    hold what fewer hold. So with two groups the least number of the second grows as the first shrinks, and the search
    walks along that line: it tries about as many sizes as there are choices, and not their product.
    """
    first = choices[0]
    if len(choices) == 1:
        fewest = _fewest(first, lambda count: is_held((count,)))
        return [] if fewest is None else [(first[fewest],)]
    second = choices[1]
    place = _fewest(second, lambda count: is_held((first[-1], count)))
    found: list[Counts] = []
    if place is None:
        return found
    found.append((first[-1], second[place]))
    for count in reversed(first[:-1]):
        while place < len(second) and not is_held((count, second[place])):
            place += 1
        if place == len(second):
            break
        if found[-1][1] == second[place]:
            found.pop()  # one machine less of the first group, and as many of the second
        found.append((count, second[place]))
    return found


def _fewest(counts: Sequence[int], is_held: Callable[[int], bool]) -> int | None:
    """The place of the lowest count that is held, by bisection; None if not even the highest is."""
    low, high = -1, len(counts)  # not held; held, or beyond the highest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_held(counts[middle]) else (middle, high)
    return high if high < len(counts) else None


def frontier(sizes: Sequence[Size], is_sure: Callable[[Size], bool] = lambda size: True) -> list[Size]:
    """The sizes that none of the others beats, by cost. One that is not sure is left out, and those that only it beat
    come in; ``is_sure`` is asked of few sizes, because it takes long.
    """
    left = list(dict.fromkeys(sizes))
    while True:
        best = [size for size in left if not any(size.is_beaten_by(other) for other in left)]
        unsure = [size for size in best if not is_sure(size)]
        if not unsure:
            return sorted(best, key=lambda size: (size.cost_per_hour, size.watts, size.design, size.counts))
        left = [size for size in left if size not in unsure]

"""Random histories that can be run again, and made shorter.

A history has a number, and so has each of its steps. A step draws its choices from a generator that these two numbers
seed. So if some steps are left out, the others still draw the same numbers.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

_MAX_SHORTER = 60  # how often a history that fails is run again to make it shorter


class Machine(Protocol):
    """What a history happens to."""

    trace: list[str]
    """What has happened, in words."""

    def begin(self, chance: Random) -> None:
        """Set the scene."""
        ...

    def step(self, chance: Random) -> None:
        """Something happens."""
        ...

    def end(self) -> None:
        """Everything settles. Raises: AssertionError, as the other methods do, if something is wrong."""
        ...


@dataclass(frozen=True)
class History:
    """``steps`` are the numbers of the steps that it has."""

    number: int
    steps: tuple[int, ...]

    def run(self, machine: Machine) -> None:
        machine.begin(Random(f"{self.number}"))
        for step in self.steps:
            machine.step(Random(f"{self.number}/{step}"))
        machine.end()


class HistoryError(AssertionError):
    """A history has failed. The text says how, and what happened in it; ``what`` and ``number`` are short."""

    def __init__(self, history: History, trace: Sequence[str], error: Exception) -> None:
        self.number = history.number
        self.what = f"{type(error).__name__}: {error}"
        self.kind = type(error)
        head = f"{self.what}\nhistory {history.number}, steps {list(history.steps)}:"
        super().__init__("\n".join([head, *trace]))


def run_histories(make: Callable[[], Machine], numbers: Iterable[int], num_steps: int, *, shorten: bool = True) -> None:
    """Run a history of ``num_steps`` steps for each number.

    Raises: HistoryError for the first history that fails, or for the shortest one that was made from it.
    """
    for number in numbers:
        history = History(number, tuple(range(num_steps)))
        failure = _failure_of(make(), history)
        if failure is not None:
            raise _shortest(make, history, failure) if shorten else failure


def _failure_of(machine: Machine, history: History) -> HistoryError | None:
    try:
        history.run(machine)
    except Exception as error:  # noqa: BLE001 - whatever fails in a history, it is reported with the history
        failure = HistoryError(history, machine.trace, error)
        failure.__cause__ = error
        return failure
    return None


def _shortest(make: Callable[[], Machine], history: History, failure: HistoryError) -> HistoryError:
    """Leave out steps, first many at a time and then single ones, as long as the same kind of error is left."""
    num_runs = 0
    size = len(history.steps) // 2
    while size and num_runs < _MAX_SHORTER:
        for begin in range(len(history.steps) - size, -1, -size):
            num_runs += 1
            shorter = History(history.number, _without(history.steps, range(begin, begin + size)))
            found = _failure_of(make(), shorter)
            if found is not None and found.kind is failure.kind:
                history, failure = shorter, found
        size //= 2
    return failure


def _without(steps: Sequence[int], places: Collection[int]) -> tuple[int, ...]:
    return tuple(step for place, step in enumerate(steps) if place not in places)

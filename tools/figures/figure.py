"""Figures, their tables, and the command, commit and machine that they come from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Self

from actorserve.errors import ActorserveError
from tools.figures.machine import Machine


class FigureError(ActorserveError):
    """A figure file cannot be read, written or shown; the text is one line that names the file."""


@dataclass(frozen=True, slots=True)
class Figure:
    """The median over ``rounds`` measurements, with the lowest and the highest; None if they are unknown.

    ``is_lower_bound``: the search ended there, and the true value is higher. ``is_upper_bound``: the search began
    there, and the true value is lower.
    """

    median: float
    min: float | None = None
    max: float | None = None
    rounds: int | None = None
    is_lower_bound: bool = False
    is_upper_bound: bool = False

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The figure of one value for each round. Raises: ValueError, if there are none."""
        if not values:
            raise ValueError("a figure needs at least one value")
        return cls(median(values), min(values), max(values), len(values))

    @classmethod
    def single(cls, value: float | None, rounds: int | None = None) -> Self | None:
        """A figure without a known spread, because one number sums up all rounds; None for no value."""
        return None if value is None else cls(value, rounds=rounds)

    @property
    def spread(self) -> float | None:
        """(max - min) / median; None if it is unknown."""
        if self.min is None or self.max is None or not self.median:
            return None
        return (self.max - self.min) / abs(self.median)


@dataclass(frozen=True, slots=True)
class Column:
    """``decimals``: how many are shown; None shows three significant digits."""

    name: str
    unit: str = ""
    decimals: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One figure for each column, or None. ``unit`` is for rows of different units, and follows each figure."""

    name: str
    cells: tuple[Figure | None, ...]
    unit: str = ""


@dataclass(frozen=True, slots=True)
class FigureTable:
    """``title`` says what the table shows; ``corner`` says what its rows are."""

    title: str
    corner: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(f"{row.name} has {len(row.cells)} cells for {len(self.columns)} columns")


@dataclass(frozen=True, slots=True)
class FigureFile:
    """Tables, and how they were measured.

    ``commit`` is the state that was measured. ``is_as_published``: the figures were entered by hand from a published
    table. ``still_representative`` says why such figures hold for later commits, too; without a reason they do not.
    ``details`` is everything else that the command measured.
    """

    command: str
    commit: str
    date: str
    machine: Machine
    torch: str | None
    tables: tuple[FigureTable, ...]
    notes: tuple[str, ...] = ()
    is_as_published: bool = False
    still_representative: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def table(self, title: str) -> FigureTable:
        """Raises: FigureError."""
        for table in self.tables:
            if table.title == title:
                return table
        raise FigureError(
            f"no table is titled {title!r}: expected {', '.join(repr(table.title) for table in self.tables)}"
        )

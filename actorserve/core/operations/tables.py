"""Tables of plain values, column by column, as answers carry them."""

import math
from collections.abc import Iterable, Sequence

from actorserve.core.messages import Column

MAX_CELL_CHARS = 250
Cell = str | int | float | None
"""A value of a table. None is an unknown number."""


def text_column(name: str, values: Iterable[str]) -> Column:
    """Longer values are cut, because other processes' names and texts are in them."""
    return Column(name, texts=tuple([value[:MAX_CELL_CHARS] for value in values]))


def integer_column(name: str, values: Iterable[int]) -> Column:
    return Column(name, integers=tuple(values))


def number_column(name: str, values: Iterable[float | None]) -> Column:
    """None, and what is infinite, become NaN."""
    known = [math.nan if value is None else value for value in values]
    return Column(name, numbers=tuple([math.nan if math.isinf(value) else value for value in known]))


def key_values(values: Iterable[tuple[str, object]]) -> tuple[Column, ...]:
    """A table of two columns: names, and values as text."""
    pairs = list(values)
    return text_column("name", [name for name, _ in pairs]), text_column("value", [str(value) for _, value in pairs])


def num_rows(columns: Sequence[Column]) -> int:
    return max((len(column.texts or column.integers or column.numbers) for column in columns), default=0)


def rows(columns: Sequence[Column]) -> list[tuple[Cell, ...]]:
    """The table row by row. Raises: ValueError if the columns are not equally long."""
    return list(zip(*map(cells, columns), strict=True))


def cells(column: Column) -> list[Cell]:
    """The values of one column."""
    if column.numbers:
        return [None if math.isnan(value) else value for value in column.numbers]
    return list(column.texts or column.integers)


def joined(tables: Sequence[Sequence[Column]]) -> tuple[Column, ...]:
    """The rows of all tables, in their order. The first table names the columns; a table with others is left out."""
    filled = [table for table in tables if num_rows(table)] or tables[:1]
    names = [column.name for column in filled[0]] if filled else []
    alike = [table for table in filled if [column.name for column in table] == names]
    return tuple(
        Column(
            name,
            sum((table[index].texts for table in alike), ()),
            sum((table[index].integers for table in alike), ()),
            sum((table[index].numbers for table in alike), ()),
        )
        for index, name in enumerate(names)
    )


def sorted_by(columns: Sequence[Column], name: str, *, reverse: bool = False) -> tuple[Column, ...]:
    """The same rows, sorted by a column of numbers."""
    keys = next((column.numbers for column in columns if column.name == name), ())
    order = sorted(range(len(keys)), key=lambda row: -keys[row] if reverse else keys[row])

    def reordered(column: Column) -> Column:
        return Column(
            column.name,
            tuple([column.texts[row] for row in order]) if column.texts else (),
            tuple([column.integers[row] for row in order]) if column.integers else (),
            tuple([column.numbers[row] for row in order]) if column.numbers else (),
        )

    return tuple(reordered(column) for column in columns) if keys else tuple(columns)

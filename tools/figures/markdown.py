"""Figure tables as Markdown."""

import math

from tools.figures.figure import Column, Figure, FigureFile, FigureTable
from tools.figures.machine import machine_line

UNKNOWN = "–"
_SIGNIFICANT = 3


def number(value: float, decimals: int | None = None) -> str:
    """With commas between thousands; without ``decimals`` three significant digits, or all digits before the point."""
    if decimals is not None:
        return f"{value:,.{decimals}f}"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, _SIGNIFICANT - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def cell(figure: Figure | None, column: Column, row_unit: str = "") -> str:
    """A table cell's text; empty for no figure."""
    if figure is None:
        return ""
    text = number(figure.median, column.decimals)
    unit = row_unit or ("x" if column.unit == "x" else "")
    glue = "" if unit == "x" else " "
    bound = "over " if figure.is_lower_bound else "under " if figure.is_upper_bound else ""
    return f"{bound}{text}{glue + unit if unit else ''}"


def table_lines(table: FigureTable) -> list[str]:
    heads = [
        f"{column.name}, {column.unit}" if column.unit not in ("", "x") else column.name for column in table.columns
    ]
    lines = [f"**{table.title}**", "", f"| {' | '.join([table.corner, *heads])} |"]
    lines.append("|---" + "|--:" * len(table.columns) + "|")
    for row in table.rows:
        cells = [cell(figure, column, row.unit) for figure, column in zip(row.cells, table.columns, strict=True)]
        lines.append(f"| {' | '.join([row.name, *cells])} |")
    return lines


def spread_of(file: FigureFile) -> str:
    """The largest relative spread among the file's figures."""
    spreads = [
        figure.spread
        for table in file.tables
        for row in table.rows
        for figure in row.cells
        if figure is not None and figure.rounds is not None and figure.rounds > 1 and figure.spread is not None
    ]
    return f"up to {max(spreads):.0%}" if spreads else UNKNOWN


def rounds_of(file: FigureFile) -> str:
    counts = {
        figure.rounds for table in file.tables for row in table.rows for figure in row.cells if figure is not None
    } - {None}
    return " or ".join(str(count) for count in sorted(count for count in counts if count)) or UNKNOWN


def source_line(file: FigureFile) -> str:
    """Where the figures come from, in one line."""
    kind = "entered as published" if file.is_as_published else f"torch {file.torch}" if file.torch else "measured"
    return (
        f"<sub>{machine_line(file.machine)} · commit {file.commit} · {file.date} · {kind} · "
        f"rounds: {rounds_of(file)} · spread: {spread_of(file)}</sub>"
    )


def file_lines(file: FigureFile) -> list[str]:
    """All tables of a file, its notes, the command, and where the figures come from."""
    lines: list[str] = []
    for table in file.tables:
        lines += [*table_lines(table), ""]
    if file.notes:
        lines += [*(f"- {note}" for note in file.notes), ""]
    return [*lines, "```sh", file.command, "```", "", source_line(file)]

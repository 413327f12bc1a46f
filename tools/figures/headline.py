"""The front page's figures: chosen from the figure files, and left out if they may no longer hold."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tools.figures.figure import Column, Figure, FigureError, FigureFile
from tools.figures.files import figure_file, read_figures
from tools.figures.markdown import cell, number

CHOICE = Path(__file__).with_name("headline.toml")


@dataclass(frozen=True, slots=True)
class Headline:
    """``text`` says what the figure is. The other fields locate it in a figure file.

    ``over_row`` or ``over_column`` name a figure to compare with. ``less_is_better`` inverts the ratio.
    """

    text: str
    file: str
    table: str
    row: str
    column: str
    over_row: str | None = None
    over_column: str | None = None
    less_is_better: bool = False


def read_headlines(file: Path = CHOICE) -> list[Headline]:
    """Raises: FigureError."""
    try:
        return TypeAdapter(list[Headline]).validate_python(tomllib.loads(file.read_text(encoding="utf-8"))["headline"])
    except (OSError, ValueError, KeyError, ValidationError) as error:
        raise FigureError(f"{file}: {error}") from None


def may_be_shown(file: FigureFile) -> bool:
    """Figures that were entered by hand need a reason to hold for today's code."""
    return not file.is_as_published or file.still_representative is not None


def headline_lines(headlines: list[Headline]) -> list[str]:
    """Raises: FigureError."""
    lines = ["| what | figure | measured on |", "|---|---|---|"]
    for headline in headlines:
        file = read_figures(figure_file(headline.file))
        if may_be_shown(file):
            shown = shown_figure(headline, file)
            lines.append(f"| {headline.text} | {shown} | {file.machine.cpu}, {file.machine.cores} cores |")
    return lines


def shown_figure(headline: Headline, file: FigureFile) -> str:
    """The figure with its unit, the figure to compare with, and the ratio. Raises: FigureError."""
    figure, text = _find(headline, file, headline.row, headline.column)
    if headline.over_row is None and headline.over_column is None:
        return f"**{text}**"
    other, other_text = _find(
        headline, file, headline.over_row or headline.row, headline.over_column or headline.column
    )
    above, below = (other, figure) if headline.less_is_better else (figure, other)
    return f"**{text}** against {other_text}: {number(above.median / below.median)}x"


def _find(headline: Headline, file: FigureFile, row_name: str, column_name: str) -> tuple[Figure, str]:
    table = file.table(headline.table)
    for row in table.rows:
        for column, figure in zip(table.columns, row.cells, strict=True):
            if (row.name, column.name) == (row_name, column_name) and figure is not None:
                return figure, cell(figure, Column(column.name, decimals=column.decimals), row.unit or column.unit)
    raise FigureError(f"{headline.file}.json: {table.title!r} has no figure at {row_name!r}, {column_name!r}")

"""The front page's figures: chosen from the figure files, and left out where they may no longer hold."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tools.figures.figure import Column, Figure, FigureError, FigureFile
from tools.figures.files import figure_file, read_figures
from tools.figures.markdown import cell

CHOICE = Path(__file__).with_name("headline.toml")


@dataclass(frozen=True, slots=True)
class Headline:
    """``text`` says what the figure is; the rest says where it stands. ``over``: another row, which it is divided by.

    ``is_inverse``: the other row is divided by this one, because less is better.
    """

    text: str
    file: str
    table: str
    row: str
    column: str
    over: str | None = None
    is_inverse: bool = False


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
    lines = ["| what | figure | measured on |", "|---|--:|---|"]
    for headline in headlines:
        file = read_figures(figure_file(headline.file))
        if may_be_shown(file):
            shown = shown_figure(headline, file)
            lines.append(f"| {headline.text} | {shown} | {file.machine.cpu}, commit {file.commit} |")
    return lines


def shown_figure(headline: Headline, file: FigureFile) -> str:
    """The figure with its unit, and how many times the other row's it is. Raises: FigureError."""
    figure, column, unit = _find(headline, file, headline.row)
    unit = unit or column.unit
    text = cell(figure, Column(column.name, decimals=column.decimals), unit)
    if headline.over is None:
        return text
    other, _, _ = _find(headline, file, headline.over)
    above, below = (other, figure) if headline.is_inverse else (figure, other)
    return f"{text} ({above.median / below.median:.1f}x)"


def _find(headline: Headline, file: FigureFile, row_name: str) -> tuple[Figure, Column, str]:
    table = file.table(headline.table)
    for row in table.rows:
        for column, figure in zip(table.columns, row.cells, strict=True):
            if (row.name, column.name) == (row_name, headline.column) and figure is not None:
                return figure, column, row.unit
    raise FigureError(f"{headline.file}.json: {table.title!r} has no figure at {row_name!r}, {headline.column!r}")

"""Lines and tables for a person."""

from rich.console import Console
from rich.table import Table

from tools.figures.figure import FigureTable


def say(console: Console, line: str) -> None:
    """Print a line as it is: no markup, no colours, no wrapping."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_table(console: Console, table: Table, first_numeric: int = 1) -> None:
    """Print a table; columns from ``first_numeric`` on hold numbers, and are aligned to the right."""
    for column in table.columns[first_numeric:]:
        column.justify = "right"
    console.print(table)


def print_figures(console: Console, table: FigureTable) -> None:
    """Print the medians of a table of figures."""
    say(console, table.title)
    columns = (f"{column.name}, {column.unit}" if column.unit else column.name for column in table.columns)
    shown = Table(table.corner, *columns)
    for row in table.rows:
        cells = ["none" if cell is None else f"{cell.median:.4g}" for cell in row.cells]
        shown.add_row(f"{row.name}, {row.unit}" if row.unit else row.name, *cells)
    print_table(console, shown)

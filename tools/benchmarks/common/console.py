"""Lines and tables for a person."""

from rich.console import Console
from rich.table import Table


def say(console: Console, line: str) -> None:
    """Print a line as it is: no markup, no colours, no wrapping."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_table(console: Console, table: Table, first_numeric: int = 1) -> None:
    """Print a table; columns from ``first_numeric`` on hold numbers, and are aligned to the right."""
    for column in table.columns[first_numeric:]:
        column.justify = "right"
    console.print(table)

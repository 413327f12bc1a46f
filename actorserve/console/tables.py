"""Answers as tables for a terminal. Text of other processes is never taken for markup, nor for control characters."""

from collections.abc import Sequence
from typing import Final

from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from actorserve.core.messages import Column
from actorserve.core.operations.tables import Cell, rows

_HIDDEN: Final = {
    "workers": ("kind", "incarnation", "preemptions", "in_flight", "swapped", "migrated"),
    "requests": ("client", "max_tokens", "silent_s"),
}
"""Columns that only JSON has, because a terminal is narrow."""
_LONG: Final = ("text", "value", "model")
"""Columns whose values may take several lines."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_STYLES: Final = {
    "open": "green",
    "running": "green",
    "done": "green",
    "cordoned": "yellow",
    "emptying": "yellow",
    "empty": "cyan",
    "restarting": "yellow",
    "terminating": "yellow",
    "refused": "red",
    "silent": "red",
}


def table_of(verb: str, columns: Sequence[Column]) -> Table:
    """The answer to ``verb`` as a table."""
    hidden = _HIDDEN.get(verb, ())
    shown = [column for column in columns if column.name not in hidden]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in shown:
        justify: JustifyMethod = "left" if column.texts else "right"
        is_long = column.name in _LONG
        table.add_column(title(column.name), justify=justify, overflow="fold", no_wrap=not is_long)
    for row in rows(shown):
        table.add_row(*(cell_text(column.name, cell) for column, cell in zip(shown, row, strict=True)))
    return table


def title(name: str) -> str:
    """A column's name for people."""
    return name.removesuffix("_bytes").removesuffix("_s").replace("_", " ")


def cell_text(name: str, cell: Cell) -> Text:
    """A value with its unit."""
    if cell is None:
        return Text("-", style="dim")
    if isinstance(cell, str):
        return Text(plain(cell), style=_STYLES.get(cell, ""))
    if name.endswith("_bytes"):
        return Text(in_bytes(cell))
    if name.endswith("_s"):
        return Text(in_seconds(cell))
    return Text(f"{cell:.0f}" if isinstance(cell, float) else str(cell))


def in_bytes(num_bytes: float) -> str:
    """Such as ``1.5 GiB``."""
    for unit in _UNITS[:-1]:
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} {_UNITS[-1]}"


def in_seconds(seconds: float) -> str:
    """Such as ``1.25 s``, ``4 min 10 s`` or ``2 h 5 min``."""
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def plain(text: str) -> str:
    """The text without what a terminal would obey."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)

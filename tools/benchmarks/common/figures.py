"""How a command hands its figures to a file."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from tools.figures.figure import FigureTable
from tools.figures.files import measured_now, write_figures
from tools.figures.machine import Machine


def save_figures(
    arguments: argparse.Namespace,
    tables: Sequence[FigureTable],
    details: Mapping[str, Any] | None = None,
    machine: Machine | None = None,
) -> None:
    """Write them to the file that ``--json`` names, if it was given. Raises: FigureError."""
    if arguments.json is not None:
        write_figures(measured_now(arguments.command_line, tables, details, machine), arguments.json)

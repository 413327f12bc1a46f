"""``tools/bench report``: write the tables of the README files from the figure files."""

import argparse

from tools.figures.figure import FigureError
from tools.figures.files import ROOT
from tools.figures.readme import READMES, filled, read_readme

EXIT_STALE = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a README is out of date")


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status. Raises: FigureError."""
    stale = []
    for file in READMES:
        before = read_readme(file)
        after = filled(before)
        if after != before:
            stale.append(file)
            if not arguments.check:
                try:
                    file.write_text(after, encoding="utf-8")
                except OSError as error:
                    raise FigureError(f"cannot write {file}: {error.strerror}") from None
    for file in stale:
        print(f"{file.relative_to(ROOT)}: {'out of date' if arguments.check else 'written'}")
    if not stale:
        print("every README shows the figures of its files")
    return EXIT_STALE if stale and arguments.check else 0

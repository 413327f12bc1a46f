"""README files whose tables are generated between two markers: ``<!-- figures: NAME -->`` and ``<!-- end -->``."""

import re
from collections.abc import Callable
from pathlib import Path

from tools.figures.figure import FigureError
from tools.figures.files import ROOT, figure_file, read_figures
from tools.figures.headline import headline_lines, read_headlines
from tools.figures.markdown import file_lines

READMES = tuple(ROOT / name for name in ("README.md", "tools/benchmarks/README.md", "config/simulations/README.md"))
HEADLINE = "headline"
_BLOCK = re.compile(r"<!-- figures: (?P<name>[\w.-]+) -->\n.*?<!-- end -->", re.DOTALL)


def lines_of(name: str) -> list[str]:
    """The generated lines between the markers of ``name``. Raises: FigureError."""
    if name == HEADLINE:
        return headline_lines(read_headlines())
    return file_lines(read_figures(figure_file(name)))


def names_in(text: str) -> list[str]:
    return [found["name"] for found in _BLOCK.finditer(text)]


def filled(text: str, lines: Callable[[str], list[str]] = lines_of) -> str:
    """``text`` with every block generated anew. Raises: FigureError."""

    def block(found: re.Match[str]) -> str:
        body = "\n".join(lines(found["name"]))
        return f"<!-- figures: {found['name']} -->\n\n{body}\n\n<!-- end -->"

    return _BLOCK.sub(block, text)


def read_readme(file: Path) -> str:
    """Raises: FigureError."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise FigureError(f"cannot read {file}: {error.strerror}") from None

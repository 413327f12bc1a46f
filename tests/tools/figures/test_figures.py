"""Figures, their files, and the tables made from them."""

import json
from pathlib import Path

import pytest

from tools.figures.figure import Column, Figure, FigureError, FigureFile, FigureTable, Row
from tools.figures.files import as_json, command_line, figure_file, measured_now, read_figures, write_figures
from tools.figures.headline import Headline, may_be_shown, shown_figure
from tools.figures.machine import Machine
from tools.figures.markdown import cell, file_lines, number, source_line
from tools.figures.readme import filled, names_in

MACHINE = Machine("a CPU", 2)
TABLE = FigureTable(
    "Speed",
    "engine",
    (Column("decode", "tokens/s", 0), Column("latency", "ms")),
    (Row("ours", (Figure(1234.0, 1200.0, 1300.0, 3), Figure(2.5))), Row("theirs", (Figure(617.0), None))),
)
FILE = FigureFile("tools/bench engine", "abcdef0", "2026-01-31", MACHINE, "2.13.0", (TABLE,), ("A note.",))


def test_a_figure_is_a_median_with_its_spread() -> None:
    """One bad round moves the maximum alone."""
    figure = Figure.of([3.0, 1.0, 2.0, 2.0, 50.0])
    assert figure == Figure(2.0, 1.0, 50.0, 5)
    assert figure.spread == 24.5
    assert Figure(2.0).spread is None
    assert Figure.single(None) is None


def test_a_row_has_a_cell_for_each_column() -> None:
    """A table with a missing cell cannot be made."""
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        FigureTable("t", "", (Column("a"), Column("b")), (Row("r", (None,)),))


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    """All fields survive, and writing the file again gives the same bytes."""
    file = tmp_path / "figures.json"
    write_figures(FILE, file)
    assert read_figures(file) == FILE
    assert file.read_text(encoding="utf-8") == as_json(FILE)
    assert figure_file("figures", [tmp_path]) == file


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    """The error names the file and the field."""
    file = tmp_path / "figures.json"
    values = json.loads(as_json(FILE))
    values["machine"]["cores"] = "two"
    file.write_text(json.dumps(values))
    with pytest.raises(FigureError, match=r"figures\.json: machine\.cores"):
        read_figures(file)
    with pytest.raises(FigureError, match="cannot read"):
        read_figures(tmp_path / "missing.json")
    with pytest.raises(FigureError, match="0 figure files are called missing"):
        figure_file("missing", [tmp_path])
    with pytest.raises(FigureError, match="cannot write"):
        write_figures(FILE, tmp_path / "no folder" / "figures.json")


def test_a_measurement_names_its_command_machine_and_commit() -> None:
    """The recorded command does not include the figures' own file."""
    command = command_line("tools/bench", ["engine", "--rounds", "2", "--json", "/tmp/a b.json", "--dtypes", "int8"])
    assert command == "tools/bench engine --rounds 2 --dtypes int8"
    assert command_line("tools/bench", ["engine", "--json=x"]) == "tools/bench engine"
    measured = measured_now(command, [TABLE])
    assert measured.machine.cpu
    assert measured.commit
    assert not measured.is_as_published


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (14.593, 3, "14.593"),
        (1704.4, None, "1,704"),
        (22.0, None, "22"),
        (12.64, None, "12.6"),
        (0.3333, None, "0.333"),
        (0.0, None, "0"),
        (100.0, None, "100"),
        (2.1, 2, "2.10"),
    ],
)
def test_numbers_are_short(value: float, decimals: int | None, text: str) -> None:
    """Numbers have three significant digits, unless the column sets the decimals."""
    assert number(value, decimals) == text


def test_cells_carry_units_of_rows_and_ratios() -> None:
    """A column's unit stands in its head, and a row's unit behind each of its figures."""
    assert cell(Figure(2.5), Column("latency", "ms")) == "2.5"
    assert cell(Figure(2.5), Column("ratio", "x", 2)) == "2.50x"
    assert cell(Figure(2.5), Column("value"), "ms") == "2.5 ms"
    assert cell(Figure(7.9, is_lower_bound=True), Column("rate")) == "over 7.9"
    assert cell(Figure(0.5, is_upper_bound=True), Column("rate")) == "under 0.5"
    assert cell(None, Column("rate")) == ""


def test_a_table_is_followed_by_its_source() -> None:
    """The source has machine, commit, date, rounds and the largest spread; an unknown spread is a dash."""
    lines = file_lines(FILE)
    assert "| engine | decode, tokens/s | latency, ms |" in lines
    assert "| ours | 1,234 | 2.5 |" in lines
    assert "| theirs | 617 |  |" in lines
    assert "- A note." in lines
    assert "tools/bench engine" in lines
    assert (
        lines[-1]
        == "<sub>a CPU, 2 cores · commit abcdef0 · 2026-01-31 · torch 2.13.0 · rounds: 3 · spread: up to 8%</sub>"
    )
    unknown = FigureFile("c", "abcdef0", "2026-01-31", MACHINE, None, (), is_as_published=True)
    assert source_line(unknown).endswith("entered as published · rounds: – · spread: –</sub>")


def test_only_text_between_markers_is_generated() -> None:
    """The rest of a README stays, and generating twice changes nothing."""
    text = "before\n<!-- figures: a -->\nold\n<!-- end -->\nbetween\n<!-- figures: b -->\n<!-- end -->\nafter\n"
    new = filled(text, lambda name: [f"table {name}"])
    assert "old" not in new
    assert new.startswith("before\n<!-- figures: a -->\n\ntable a\n\n<!-- end -->\nbetween\n")
    assert new.endswith("table b\n\n<!-- end -->\nafter\n")
    assert filled(new, lambda name: [f"table {name}"]) == new
    assert names_in(text) == ["a", "b"]


def test_a_headline_compares_two_figures() -> None:
    """A headline compares rows or columns, and its ratio is above one if ours is better."""
    headline = Headline("t", "f", "Speed", "ours", "decode", over_row="theirs")
    assert shown_figure(headline, FILE) == "**1,234 tokens/s** against 617 tokens/s: 2x"
    assert shown_figure(Headline("t", "f", "Speed", "ours", "latency"), FILE) == "**2.5 ms**"
    with pytest.raises(FigureError, match="no figure at 'nobody'"):
        shown_figure(Headline("t", "f", "Speed", "nobody", "decode"), FILE)
    with pytest.raises(FigureError, match="no table is titled"):
        shown_figure(Headline("t", "f", "Size", "ours", "decode"), FILE)


def test_published_figures_need_a_reason_to_be_shown() -> None:
    """Measured figures need none."""
    published = FigureFile("c", "abcdef0", "2026-01-31", MACHINE, None, (), is_as_published=True)
    reasoned = FigureFile("c", "abcdef0", "2026-01-31", MACHINE, None, (), (), True, "the same code")
    assert [may_be_shown(file) for file in (FILE, published, reasoned)] == [True, False, True]

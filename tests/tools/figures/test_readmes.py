"""The figures of the README files are those of the figure files, and every file says how to take its figures again."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from tools.benchmarks.__main__ import COMMANDS, make_parser
from tools.benchmarks.serving.policies import load_title
from tools.figures.figure import FigureFile
from tools.figures.files import FOLDERS, ROOT, figure_file, read_figures
from tools.figures.headline import may_be_shown, read_headlines, shown_figure
from tools.figures.readme import HEADLINE, READMES, filled, names_in, read_readme
from tools.fuzzing.__main__ import make_parser as make_fuzz_parser
from tools.simulation.__main__ import (
    make_compare_parser,
    make_parser as make_simulation_parser,
    make_provision_parser,
)
from tools.simulation.experiment import read_experiment
from tools.simulation.provisioning.plan import read_provisioning

FILES = sorted(file for folder in FOLDERS for file in folder.glob("*.json"))
MAX_FRONT_PAGE_LINES = 200
NUM_HEADLINES = 10


def check_command(command: str) -> None:
    """Raise or exit if the command does not exist, or does not take its arguments."""
    program, *arguments = shlex.split(command)
    match program:
        case "tools/bench":
            make_parser(arguments[0]).parse_args(arguments)
        case "tools/fuzz":
            make_fuzz_parser().parse_args(arguments)
        case "tools/simulate" if arguments[0] == "compare":
            make_compare_parser().parse_args(arguments[1:])
        case "tools/simulate" if arguments[0] == "provision":
            parsed = make_provision_parser().parse_args(arguments[1:])
            read_provisioning(ROOT / parsed.config, {})
        case "tools/simulate":
            parsed = make_simulation_parser().parse_args(arguments)
            read_experiment(ROOT / parsed.config, {})
        case "tools/test":
            assert (ROOT / arguments[0]).is_file()
            options = " ".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("conftest.py"))
            assert all(f'"{argument}"' in options for argument in arguments if argument.startswith("--"))
        case _:
            raise AssertionError(f"unknown program in {command!r}")


@pytest.mark.parametrize("file", READMES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_readme_shows_the_figures_of_its_files(file: Path) -> None:
    """``tools/bench report`` would change nothing."""
    text = read_readme(file)
    assert names_in(text)
    assert filled(text) == text


def test_every_figure_file_is_shown() -> None:
    """Every figure file is shown once in all READMEs."""
    shown = [name for file in READMES for name in names_in(read_readme(file)) if name != HEADLINE]
    assert sorted(shown) == sorted(file.stem for file in FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_figure_file_says_where_its_figures_come_from(file: Path) -> None:
    """A figure file names the CPU, the commit, the date, and a command that exists."""
    figures = read_figures(file)
    assert figures.machine.cpu
    assert figures.machine.cores > 0
    assert re.fullmatch(r"[0-9a-f]{7,40}( with local changes)?", figures.commit)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", figures.date)
    assert figures.tables
    check_command(figures.command)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_spreads_hold_their_medians(file: Path) -> None:
    """The lowest and the highest value enclose the median; an unknown spread has neither."""
    for table in read_figures(file).tables:
        for figure in (cell for row in table.rows for cell in row.cells if cell is not None):
            assert (figure.min is None) == (figure.max is None)
            if figure.min is not None and figure.max is not None:
                assert figure.min <= figure.median <= figure.max


def test_the_front_page_is_short_and_has_ten_figures() -> None:
    """Each headline names a figure that exists, even when its file is too old to be shown."""
    assert len(read_readme(ROOT / "README.md").splitlines()) <= MAX_FRONT_PAGE_LINES
    headlines = read_headlines()
    assert len(headlines) == NUM_HEADLINES
    for headline in headlines:
        assert shown_figure(headline, read_figures(figure_file(headline.file)))


def test_old_figures_stay_off_the_front_page() -> None:
    """A figure that was entered by hand is shown only with a reason why it still holds."""
    page = read_readme(ROOT / "README.md")
    for headline in read_headlines():
        assert (f"| {headline.text} |" in page) == may_be_shown(read_figures(figure_file(headline.file)))


def test_commands_in_readmes_exist() -> None:
    """The arguments of every measuring command in a README's shell blocks parse."""
    for file in READMES:
        for block in re.findall(r"```sh\n(.*?)```", read_readme(file), re.DOTALL):
            for line in block.splitlines():
                command = line.partition("#")[0].strip()
                if command.startswith(("tools/bench ", "tools/simulate ", "tools/test tests")):
                    check_command(command)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_module_with_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command's --help works without the other commands' modules, and names the command."""
    with pytest.raises(SystemExit) as ended:
        make_parser(name).parse_args([name, "--help"])
    assert ended.value.code == 0
    assert name in capsys.readouterr().out


def test_parsers_of_other_commands_stay_empty() -> None:
    """Only the chosen command's module is imported, so its arguments alone are known."""
    parser = make_parser("report")
    assert parser.parse_args(["report", "--check"]) is not None
    with pytest.raises(SystemExit):
        parser.parse_args(["engine", "--rounds", "1"])
    assert isinstance(parser, argparse.ArgumentParser)


def test_headlines_survive_a_new_measurement() -> None:
    """The names that the commands give their tables are those that the headlines use."""
    titles = {headline.file: headline.table for headline in read_headlines()}
    assert titles["policies"] == load_title(0.9)
    for name, title in titles.items():
        file: FigureFile = read_figures(figure_file(name))
        assert file.table(title)

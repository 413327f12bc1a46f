"""The source tree stays readable: no import cycle among files or folders, small files, and small folders."""

from collections.abc import Collection, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath
from statistics import median

import pytest

from tests.sources import SOURCES, imported_files

MAX_LINES = 500
MAX_MEDIAN_LINES = 150
MAX_FILES = 14
# One file per part of a format; the prefixes of the names group the files.
CROWDED = ("actorserve/model_files",)
PRODUCT = [path for path in SOURCES if not path.startswith("tests/")]


def num_lines(path: str) -> int:
    return len(SOURCES[path].read_text(encoding="utf-8").splitlines())


def siblings(imports: Mapping[str, Collection[str]]) -> dict[str, dict[str, set[str]]]:
    """Folder -> file or subfolder -> the files and subfolders of the same folder that it imports, at any depth.

    Packages' ``__init__`` files stand for their folders and are left out.
    """
    found: dict[str, dict[str, set[str]]] = {}
    for importer, targets in imports.items():
        for target in targets:
            above, below = PurePosixPath(importer).parts, PurePosixPath(target).parts
            depth = next(place for place, (a, b) in enumerate(zip(above, below, strict=False)) if a != b)
            if "__init__.py" not in (above[depth], below[depth]):
                folder = found.setdefault("/".join(above[:depth]), {})
                folder.setdefault(above[depth], set()).add(below[depth])
    return found


def cycle_in(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """One cycle of the graph; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


def test_no_imports_form_a_cycle() -> None:
    """The imports among the files and subfolders of a folder form no cycle."""
    imports = {path: imported_files(path) for path in PRODUCT}
    graphs = siblings(imports)
    assert {folder: cycle for folder, graph in graphs.items() if (cycle := cycle_in(graph))} == {}
    assert len(graphs) > 10, "almost no import was read"


def test_a_cycle_of_folders_is_found() -> None:
    """Two folders that import each other form a cycle, although no two files do."""
    imports = {"a/x/one.py": ["a/y/two.py"], "a/y/three.py": ["a/x/four.py"]}
    assert set(cycle_in(siblings(imports)["a"])) == {"x", "y"}


@pytest.mark.parametrize("path", SOURCES)
def test_files_are_short(path: str) -> None:
    """A file has one duty, so it has at most 500 lines."""
    assert num_lines(path) <= MAX_LINES


def test_most_files_are_read_in_a_minute() -> None:
    """Half of the product's files have fewer than 150 lines."""
    assert median(num_lines(path) for path in PRODUCT if not path.endswith("/__init__.py")) < MAX_MEDIAN_LINES


@pytest.mark.parametrize("path", SOURCES)
def test_no_test_module_is_imported(path: str) -> None:
    """What two test modules share lies in a module of its own, so that importing it collects no tests."""
    assert [name for name in imported_files(path) if PurePosixPath(name).name.startswith("test_")] == []


def test_folders_are_not_crowded() -> None:
    """A folder holds at most 14 files of code, not counting its ``__init__``."""
    folders: dict[str, list[str]] = {}
    for path in PRODUCT:
        if not path.endswith("/__init__.py"):
            folders.setdefault(str(PurePosixPath(path).parent), []).append(path)
    assert {
        folder: len(files) for folder, files in folders.items() if len(files) > MAX_FILES and folder not in CROWDED
    } == {}

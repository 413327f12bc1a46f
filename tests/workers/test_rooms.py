"""The folders of ``workers/`` form a graph without cycles, so a reader can take them one after another."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def room_of(module: str) -> str:
    """The folder under ``workers/``, or the module itself if it lies in no subfolder."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imported_rooms(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "workers":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("workers."):
            yield room_of(node.module or "")
        elif isinstance(node, ast.Import):
            yield from (room_of(alias.name) for alias in node.names if alias.name.startswith("workers."))


def graph_of(files: Mapping[Path, str]) -> dict[str, set[str]]:
    """Which rooms each room imports; ``files`` are paths below ``workers/`` with their source."""
    graph: dict[str, set[str]] = {}
    for file, source in files.items():
        room = file.parts[0].removesuffix(".py")
        graph.setdefault(room, set()).update(set(imported_rooms(source)) - {room})
    return graph


def test_the_rooms_form_no_cycle() -> None:
    """No folder of ``workers/`` imports, directly or through others, a folder that imports it."""
    folder = ROOT / "workers"
    files = {file.relative_to(folder): file.read_text(encoding="utf-8") for file in folder.rglob("*.py")}
    graph = graph_of(files)
    assert {"kernels", "weights", "models", "kv", "engines", "memory"} <= graph.keys()
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("line", ["from workers.b.y import Y", "import workers.b.y", "from workers import b"])
def test_a_cycle_is_found(line: str) -> None:
    """The rule above notices a cycle, however the import is written, inside a function too."""
    files = {Path("a/x.py"): f"def f():\n    {line}", Path("b/y.py"): "from workers.a import x"}
    with pytest.raises(CycleError):
        TopologicalSorter(graph_of(files)).prepare()

"""The packages that the server imports are its declared dependencies."""

import re
import sys
import tomllib
from importlib.metadata import packages_distributions

from tests.sources import OURS, ROOT, SOURCES, imports_of, module_name, parse

SERVER = ("actorserve/", "workers/")
NOT_INSTALLED = {"_typeshed", "triton"}
"""Type checkers know the first one, and torch's CUDA builds include the second one."""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_imported_package_is_named() -> None:
    """The server imports no package that only another package brings along, because that may end with an update."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["otel"]]
    named = {normalized(re.split(r"[^\w.-]", text, maxsplit=1)[0]) for text in declared}
    imported = {
        name.split(".")[0]
        for path, file in SOURCES.items()
        if path.startswith(SERVER)
        for name in imports_of(parse(file), module_name(file), file.name == "__init__.py")
    }
    packages = imported - {*OURS, *NOT_INSTALLED, *sys.stdlib_module_names}
    distributions = packages_distributions()
    assert {name for name in packages if named.isdisjoint(map(normalized, distributions.get(name, [])))} == set()

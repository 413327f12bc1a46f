"""The repository's Python files and their imports, read from their text."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = ("actorserve", "workers", "tools", "tests")
SOURCES = {str(file.relative_to(ROOT)): file for folder in OURS for file in sorted((ROOT / folder).rglob("*.py"))}
"""By path from the repository's root, with forward slashes."""


def module_name(file: Path) -> str:
    """The dotted name by which other files import this one."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): path for path, file in SOURCES.items()}


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def imports_of(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Names of all modules that a file imports, anywhere in it; ``from a import b`` counts as ``a`` and as ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imported_files(path: str) -> set[str]:
    """Our files that this file imports. A package that only contains an imported module does not count."""
    file = SOURCES[path]
    names = set(imports_of(parse(file), module_name(file), file.name == "__init__.py"))
    names -= {name for name in names if any(other.startswith(f"{name}.") and other in MODULES for other in names)}
    return {MODULES[name] for name in names if name in MODULES} - {path}


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")

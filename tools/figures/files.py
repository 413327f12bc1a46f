"""Figure files on the disk: JSON, validated as it is read."""

import datetime
import json
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tools.figures.figure import FigureError, FigureFile, FigureTable
from tools.figures.machine import Machine, this_machine

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "tools" / "benchmarks" / "figures", ROOT / "config" / "simulations" / "figures")
"""The folders of the figure files."""

_CODE = ("actorserve", "workers", "tools", "config", ":!*.json", ":!*.md", ":!*.png")
_ADAPTER = TypeAdapter(FigureFile)


def command_line(program: str, arguments: Sequence[str]) -> str:
    """The command without ``--json FILE``, which changes no figure."""
    kept: list[str] = []
    given = iter(arguments)
    for argument in given:
        if argument == "--json":
            next(given, None)
        elif not argument.startswith("--json="):
            kept.append(argument)
    return shlex.join([program, *kept])


def current_commit(root: Path = ROOT) -> str:
    """The checked-out commit, with a mark when code has changed since; "unknown" outside of a git repository."""
    commit = _git(root, "rev-parse", "--short=10", "HEAD")
    if not commit:
        return "unknown"
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *_CODE)
    return f"{commit} with local changes" if changed else commit


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def measured_now(
    command: str,
    tables: Sequence[FigureTable],
    details: Mapping[str, Any] | None = None,
    machine: Machine | None = None,
) -> FigureFile:
    """Figures that this process has just taken on this machine."""
    return FigureFile(
        command=command,
        commit=current_commit(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=machine or this_machine(),
        torch=_version("torch"),
        tables=tuple(tables),
        details=dict(details or {}),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def as_json(figures: FigureFile) -> str:
    return json.dumps(asdict(figures), indent=1, ensure_ascii=False) + "\n"


def write_figures(figures: FigureFile, file: Path) -> None:
    """Raises: FigureError."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        unfinished.write_text(as_json(figures), encoding="utf-8")
        unfinished.replace(file)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise FigureError(f"cannot write {file}: {error.strerror}") from None


def read_figures(file: Path) -> FigureFile:
    """Raises: FigureError."""
    try:
        return _ADAPTER.validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise FigureError(f"cannot read {file}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise FigureError(f"{file}: {place}: {first['msg']}") from None


def figure_file(name: str, folders: Sequence[Path] = FOLDERS) -> Path:
    """The one file of that name. Raises: FigureError."""
    found = [file for folder in folders if (file := folder / f"{name}.json").is_file()]
    if len(found) != 1:
        raise FigureError(f"{len(found)} figure files are called {name}.json: expected one")
    return found[0]

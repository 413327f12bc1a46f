"""Environments of clients: each is installed once, with exact versions, into a folder of its own under ``.clients``.

A stamp, written last, holds a hash of what was asked for. So an installation that was interrupted, or whose versions
have changed, is made again.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from tools.compatibility.errors import CompatibilityError, MissingProgramError

ROOT: Final = Path(__file__).parents[2]
PINS: Final = Path(__file__).parent / "environments"
INSTALLED: Final = ROOT / ".clients"

_STAMP: Final = "installed.stamp"


class Environment(Protocol):
    """Where a client is installed, and how its checks run there."""

    @property
    def name(self) -> str: ...

    def install(self) -> None:
        """Install the pinned packages unless they are installed. Raises: CompatibilityError."""
        ...

    def version(self, package: str) -> str:
        """The version of an installed package."""
        ...

    def command(self, checks: Sequence[Path], report: Path) -> list[str]:
        """The command that runs files of checks and writes a JUnit report."""
        ...


@dataclass(frozen=True, slots=True)
class PythonEnvironment:
    """A virtual environment of the packages in ``environments/NAME.txt``. Checks run under pytest."""

    name: str

    @property
    def folder(self) -> Path:
        return INSTALLED / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def install(self) -> None:
        pins = PINS / f"{self.name}.txt"
        with _unless_installed(self.folder, [pins], sys.version) as is_needed:
            if is_needed:
                _run([sys.executable, "-m", "venv", str(self.folder)])
                pip = [str(self.python), "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
                # Python compiles what the checks import; to compile all takes as long as the rest of the installation.
                _run([*pip, "--no-compile", "--quiet", "--requirement", str(pins)])

    def version(self, package: str) -> str:
        query = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
        return _run([str(self.python), "-I", "-c", query]).strip()

    def command(self, checks: Sequence[Path], report: Path) -> list[str]:
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            "asyncio_mode=auto",
            "-o",
            "asyncio_default_test_loop_scope=session",
            "--capture=no",  # what a check prints is shown with --verbose
            f"--junitxml={report}",
        ]
        folder = checks[0].parent
        # -P and --confcutdir: of ours, only the fixtures beside the checks are loaded.
        where = ["--rootdir", str(folder), "--confcutdir", str(folder), "-c", os.devnull]
        return [str(self.python), "-P", "-m", "pytest", *options, *where, *(str(file) for file in checks)]


@dataclass(frozen=True, slots=True)
class NodeEnvironment:
    """The packages of ``environments/NAME/package-lock.json``. Checks run under Node's own test runner."""

    name: str

    @property
    def folder(self) -> Path:
        return INSTALLED / self.name

    def install(self) -> None:
        for program in ("node", "npm"):
            if shutil.which(program) is None:
                raise MissingProgramError(f"{program} is not installed")
        files = [PINS / self.name / name for name in ("package.json", "package-lock.json")]
        with _unless_installed(self.folder, files, _run(["node", "--version"])) as is_needed:
            if is_needed:
                for file in files:
                    shutil.copy(file, self.folder)
                _run(["npm", "ci", "--no-audit", "--no-fund", "--prefix", str(self.folder)])

    def version(self, package: str) -> str:
        file = self.folder / "node_modules" / package / "package.json"
        return _run(["node", "--print", f"require({str(file)!r}).version"]).strip()

    def command(self, checks: Sequence[Path], report: Path) -> list[str]:
        # Node looks for packages beside a file and above it, so the checks are copied beside the packages, and what
        # they share.
        for file in checks[0].parent.glob("*.mjs"):
            shutil.copy(file, self.folder)
        reporter = ["--test-reporter=junit", f"--test-reporter-destination={report}"]
        return ["node", "--test", *reporter, *(str(self.folder / file.name) for file in checks)]


@contextmanager
def _unless_installed(folder: Path, pins: Sequence[Path], program: str) -> Iterator[bool]:
    """Whether the ``with`` block has to install; ``folder`` is empty then. Two installations of it take turns."""
    wanted = hashlib.sha256("\0".join([program, *(pin.read_text("utf-8") for pin in pins)]).encode()).hexdigest()
    stamp = folder / _STAMP
    INSTALLED.mkdir(exist_ok=True)
    lock = os.open(pins[0], os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_needed = not stamp.exists() or stamp.read_text("utf-8") != wanted
        if is_needed:
            print(f"clients: installing {folder.name}", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        yield is_needed
        stamp.write_text(wanted, "utf-8")
    finally:
        os.close(lock)


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """A command's output. Raises: CompatibilityError with the last line of its errors."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode != 0:
        told = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise CompatibilityError(f"{Path(command[0]).name} failed: {told[-1][:300]}")
    return done.stdout

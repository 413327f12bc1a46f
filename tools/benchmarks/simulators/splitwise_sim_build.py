"""Fetches SplitwiseSim, which measurements compare our simulator with, and installs what it needs.

It lies in the cache folder at one revision, in an environment of its own. Serving, simulations and tests do not use it.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from actorserve.model_files.default_model import cache_folder
from tools.benchmarks.common.errors import BenchError

SOURCE = "https://github.com/Mutinifni/splitwise-sim"
REVISION = "8f99e7dc9b407f4ce2488d03dd44c0b8b946dab0"
PACKAGES = ("hydra-core==1.3.2", "networkx==3.1", "numpy==1.25.2", "omegaconf==2.3.0", "pandas==2.0.3", "scipy==1.11.3")
"""What a simulation needs, at the versions that SplitwiseSim asks for."""

ADVICE = "tools/bench peers splitwise-sim fetches it"
_PIP = ("-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--quiet")


@dataclass(frozen=True, slots=True)
class SplitwiseSimBuild:
    """SplitwiseSim with its environment, in one folder."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def sources(self) -> Path:
        return self.folder / "sources"


def build_folder() -> Path:
    """The folder of this revision for this Python."""
    version = f"py{sys.version_info.major}.{sys.version_info.minor}"
    return cache_folder() / "peers" / f"splitwise-sim-{REVISION[:10]}-{version}"


def find_build() -> SplitwiseSimBuild | None:
    """None if it is not here yet."""
    return SplitwiseSimBuild(build_folder()) if build_folder().exists() else None


def ensure_build(console: Console, source: str = SOURCE) -> SplitwiseSimBuild:
    """Fetch it from ``source``, a URL or a folder that git can read, unless it is here. Raises: BenchError."""
    found = find_build()
    if found is None:
        with console.status("fetching SplitwiseSim"):
            _build(build_folder(), source)
        found = SplitwiseSimBuild(build_folder())
    console.print(f"SplitwiseSim {REVISION[:10]} is in {found.folder}", soft_wrap=True)
    return found


def _build(target: Path, source: str) -> None:
    """Build in a temporary folder and rename it, so that ``target`` is always complete.

    If two processes do this at once, the first one's folder stays.
    """
    if shutil.which("git") is None:
        raise BenchError("fetching SplitwiseSim takes git; apt install git")
    unfinished = SplitwiseSimBuild(target.with_name(f"{target.name}.{os.getpid()}"))
    try:
        unfinished.folder.mkdir(parents=True)
        _run(
            ["git", "clone", "--quiet", "--no-checkout", source, str(unfinished.sources)],
            f"cannot fetch SplitwiseSim from {source}; with --source it comes from another URL or folder",
        )
        _run(
            ["git", "-C", str(unfinished.sources), "checkout", "--quiet", REVISION],
            f"{source} has no revision {REVISION[:10]} of SplitwiseSim",
        )
        _run([sys.executable, "-m", "venv", str(unfinished.folder / "venv")], "cannot make an environment")
        _run([str(unfinished.python), *_PIP, *PACKAGES], "cannot install what SplitwiseSim needs")
        with contextlib.suppress(FileExistsError):
            unfinished.folder.rename(target)
    except OSError as error:
        raise BenchError(f"cannot put SplitwiseSim into {target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(unfinished.folder, ignore_errors=True)


def _run(command: list[str], problem: str) -> None:
    """Raises: BenchError, if the command fails."""
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False, env=quiet
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        told = next((line for line in lines if "error" in line.lower() or "fatal" in line.lower()), lines[-1])
        raise BenchError(f"{problem}: {told[:300]}")

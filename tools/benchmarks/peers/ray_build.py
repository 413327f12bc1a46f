"""Installs Ray, which measurements compare our actors with, into an environment of its own in the cache folder.

Serving and the tests do not use it.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from actorserve.model_files.default_model import cache_folder
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.peers.llama_build import CONSTRAINTS

VERSION = "2.60.0"
ADVICE = "tools/bench peers ray installs it"
_PIP = ("-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--quiet")


def folder() -> Path:
    """The folder of this version for this Python."""
    return cache_folder() / "peers" / f"ray-{VERSION}-py{sys.version_info.major}.{sys.version_info.minor}"


def find_ray() -> Path | None:
    """The Python of Ray's environment; None if Ray is not installed yet."""
    return _python(folder()) if folder().exists() else None


def ensure_ray(console: Console) -> Path:
    """Install it unless it is installed. Raises: BenchError."""
    found = find_ray()
    if found is None:
        with console.status(f"installing Ray {VERSION}"):
            _install(folder())
        found = _python(folder())
    console.print(f"Ray {VERSION} is in {folder()}", soft_wrap=True)
    return found


def _python(environment: Path) -> Path:
    return environment / "bin" / "python"


def _install(target: Path) -> None:
    """Install into a temporary folder and rename it, so that ``target`` is always complete.

    If two installations run at once, the first one stays. Renaming is safe, because only the environment's Python is
    run by its path.
    """
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", str(unfinished)])
        _run([str(_python(unfinished)), *_PIP, "--constraint", str(CONSTRAINTS), f"ray=={VERSION}"])
        _run([str(_python(unfinished)), "-I", "-c", "import ray"])
        with contextlib.suppress(FileExistsError):
            unfinished.rename(target)
    except OSError as error:
        raise BenchError(f"cannot install Ray in {target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _run(command: list[str]) -> None:
    """Raises: BenchError, if the command fails."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode != 0:
        told = [line for line in done.stderr.splitlines() if "error" in line.lower()] or ["no reason given"]
        raise BenchError(f"installing Ray failed: {told[0][:300]}")
